#!/usr/bin/env python3
"""Measures fine-tuning against transformers' Trainer: items a second in training and in prediction.

    python benchmarks/finetuning.py
    python benchmarks/finetuning.py --size base --steps 4 --contests sst2-padded squad-padded --numbers autocast

Both train the same model on the same items of real tasks (from the folder that CLOZE_DATA names), as many in a batch,
with dropout, the same AdamW and clipping, on 2 cores. We pad nothing; the Trainer pads to the longest sequence that a
task allows, or to the longest of a batch with lengths grouped. It computes in bf16 by autocast, in fp32, and with
weights in bf16, which lose small steps: that is shown, but the goals are about the faster of the others. Sides take
turns of an epoch of some steps; ratios are medians. A third side is ours as two ranks of one thread.

The last measurement is how long the first step takes to come on a file of 100 MB, beyond imports. The numbers are kept
in benchmarks/results/.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    DATA,
    leave_own_folder,
    median_ratio,
    mistakes_told,
    read_results,
    record,
    results_file,
    write_results,
)

leave_own_folder()

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.fine_tuners import CORES, Entrant, Work, open_sides
from benchmarks.trainer_peer import Numbers
from data_prep.common.errors import UserError
from data_prep.vocabulary.source import find_vocabulary
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.huggingface.folders import read_shape, write_folder
from pretraining.model.bert import Bert
from pretraining.model.shape import SIZES, Shape
from pretraining.processes.group import choose_device
from pretraining.processes.launchers import World

WIDTHS = {"sst2": 128, "cola": 128, "squad": 384}
"""What users pad the sequences of a task to."""
BATCHES = {"sst2": 32, "cola": 32, "squad": 16}
STEPS = {"tiny": 64, "mini": 64, "small": 16}
"""Steps of an epoch by the size of the model; fewer for larger ones."""
LEAST_STEPS = 4
GOALS = {"sst2-padded": 6.0, "cola-padded": 6.0, "squad-padded": 2.0, "sst2-dynamic": 1.5, "cola-dynamic": 1.5}
"""How many times as fast we are to be."""
GOAL_SECONDS = 5.0
HONEST: tuple[Numbers, ...] = ("autocast", "fp32")
"""What the Trainer is to be compared with: its weights are in fp32, as ours are."""
MEGABYTES = 100


@dataclass(frozen=True)
class Finetuning:
    """Measures fine-tuning against transformers' Trainer."""

    model: Path | None = None
    """Folder of a BERT of transformers (default: one with fresh weights, which take as long)."""
    size: str = "mini"
    """Its size, where none is given."""
    data: Path = DATA
    """Folder with glue/, squad/ and vocab.txt."""
    contests: tuple[str, ...] = (
        "sst2-padded",
        "sst2-dynamic",
        "cola-padded",
        "cola-dynamic",
        "squad-padded",
        "squad-dynamic",
    )
    """Which of them; what is kept of others stays."""
    numbers: tuple[Numbers, ...] = ("autocast", "fp32", "bf16")
    """What the Trainer computes in, one after another."""
    steps: int | None = None
    """Steps of a turn (default: by size)."""
    rounds: int = 5
    """Turns of which the median is taken."""
    two_ranks: bool = True
    """Measure two ranks of one thread beside one process of two."""
    first_step: bool = True
    """Measure how long the first step takes to come."""
    out: Path = field(default_factory=partial(results_file, "finetuning"))
    """File for the numbers."""


def make_model(size: str, data: Path, folder: Path) -> Path:
    """A folder of transformers with fresh weights and the published vocabulary."""
    if size not in SIZES:
        raise UserError(f"--size {size}: is none of {', '.join(SIZES)}")
    if not (data / "vocab.txt").exists():
        raise UserError(f"{data} has no vocab.txt: set CLOZE_DATA, or give --data")
    vocabulary = find_vocabulary(str(data / "vocab.txt"), cased=False)
    vocabulary.write(folder.with_name("vocabulary"))
    shape = Shape.named(size, len(vocabulary))
    write_folder(
        folder, shape, Bert(shape).initialize(0).state_dict(), folder.with_name("vocabulary"), "fresh weights\n"
    )
    return folder


def compete(entrants: list[Entrant], work: Work) -> dict[str, dict[str, list[float]]]:
    """Seconds of every side's turns, in training and in prediction; the first turn of each warms it up."""
    with open_sides(entrants, work) as sides:
        turns = [[side.turn() for side in sides] for _ in range(2 * work.epochs)]
    found = {side.name: [turn[number] for turn in turns] for number, side in enumerate(sides)}
    return {
        name: {"training": taken[1 : work.epochs], "prediction": taken[work.epochs + 1 :]}
        for name, taken in found.items()
    }


def run_contest(name: str, settings: Finetuning, work: Work) -> dict[str, Any]:
    """Ours against the Trainer with all numbers, one after another."""
    found: dict[str, Any] = {"batch": work.batch, "steps": work.steps, "against": {}}
    width = WIDTHS[work.task] if name.endswith("-padded") else 0
    for numbers in settings.numbers:
        entrants = [Entrant("cloze"), Entrant("transformers", numbers=numbers, width=width)]
        if settings.two_ranks and numbers == settings.numbers[0]:
            entrants.append(Entrant("cloze, two ranks", ranks=CORES))
        taken = compete(entrants, work)
        found["against"][numbers] = summarise(taken, "transformers", work)
        if len(entrants) > 2:
            found["two ranks"] = summarise(taken, "cloze, two ranks", work)
    return found


def summarise(taken: dict[str, dict[str, list[float]]], other: str, work: Work) -> dict[str, Any]:
    """Items a second of us and of another side, and how many times as fast we are."""
    items = work.steps * work.batch
    return {
        what: {
            "cloze": round(items / statistics.median(seconds), 1),
            other: round(items / statistics.median(taken[other][what]), 1),
            "times_as_fast": round(median_ratio(taken[other][what], seconds), 2),
        }
        for what, seconds in taken["cloze"].items()
    }


FIRST_STEP = """
import sys, time
from unittest.mock import patch
import deepspeed
import finetuning.run_glue as entry
from finetuning.running.loop import Run
from pretraining.engine import gradients
from pretraining.model import cpu_kernels
import torch
cpu_kernels.usable(torch.zeros(1))
def told(self):
    print("first step after", time.perf_counter() - begin, flush=True)
    entry.exit_now(0)
with patch.object(Run, "after_step", told):
    begin = time.perf_counter()
    entry.main(entry.RunGlue, sys.argv[1:], "run_glue.py")
"""


def first_step(model: Path, data: Path, megabytes: int = MEGABYTES) -> float:
    """Seconds from the start of the command, all imported, to the end of its first step, on SST-2 made so large."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "glue" / "SST-2"
        place.mkdir(parents=True)
        head, _, rows = (data / "glue" / "SST-2" / "train.tsv").read_text().partition("\n")
        with (place / "train.tsv").open("w") as file:
            file.write(head + "\n")
            for _ in range(-(-megabytes * 1_000_000 // len(rows))):
                file.write(rows)
        (place / "dev.tsv").write_text((data / "glue" / "SST-2" / "dev.tsv").read_text())
        words = ["--model", model, "--data", place.parent, "--out", f"{folder}/out", "--learning-rates", "1e-4"]
        words += ["--search.jobs", "1", "--logging.tensorboard", "false"]
        command = [sys.executable, "-c", FIRST_STEP, *map(str, words)]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("first step after")]
    if not told:
        raise UserError(f"the first step did not come: {done.stdout[-500:]}{done.stderr[-2000:]}")
    return float(told[0].split()[-1])


def measure(settings: Finetuning, console: Console) -> None:
    """Goes through the contests, and keeps what is found after each, since they take minutes."""
    models = read_results(settings.out)["models"] if settings.out.exists() else {}
    results = record("finetuning", ["torch", "deepspeed", "transformers", "accelerate"], {"models": models})
    with tempfile.TemporaryDirectory() as folder:
        model = settings.model or make_model(settings.size, settings.data, Path(folder) / settings.size)
        shape, dtype = read_shape(model), name_dtype(choose_dtype("auto", choose_device("auto", World())))
        found = models.setdefault(model.name, {"contests": {}})
        found |= {"layers": shape.layers, "hidden": shape.hidden, "dtype": dtype, "threads": CORES}
        for name in settings.contests:
            task = name.partition("-")[0]
            if task not in WIDTHS or not name.endswith(("-padded", "-dynamic")):
                raise UserError(f"--contests {name}: give {', '.join(WIDTHS)} with -padded or -dynamic")
            steps = settings.steps or STEPS.get(settings.size, LEAST_STEPS)
            work = Work(task, model, settings.data.resolve(), BATCHES[task], steps, 1 + settings.rounds)
            found["contests"][name] = run_contest(name, settings, work)
            write_results(settings.out, results)
            console.print(table(model.name, {name: found["contests"][name]}))
        if settings.first_step:
            found["seconds_to_the_first_step_of_100_MB"] = seconds = round(first_step(model, settings.data), 2)
            console.print(f"first step after {seconds} s beyond imports (goal: {GOAL_SECONDS})")
    console.print(f"kept in {write_results(settings.out, results)}")


def table(model: str, contests: dict[str, Any]) -> Table:
    """How many times as fast we are, in all contests of a model."""
    made = Table(model, "transformers in", "training: its items/s", "ours", "times", box=None)
    for title in ("prediction: its", "ours", "times", "goal"):
        made.add_column(title)
    for name, found in contests.items():
        for numbers, each in found["against"].items():
            goal = f"{GOALS[name]:g}" if name in GOALS and numbers in HONEST else ""
            made.add_row(name, numbers, *_cells(each["training"]), *_cells(each["prediction"]), goal)
        if "two ranks" in found:
            each = found["two ranks"]
            made.add_row(name, "(our two ranks)", *_cells(each["training"]), *_cells(each["prediction"]), "")
    return made


def _cells(found: dict[str, float]) -> list[str]:
    ours, theirs, ratio = found.values()
    return [f"{theirs:,.0f}", f"{ours:,.0f}", f"{ratio:.2f}"]


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Finetuning, args=arguments, prog="finetuning.py", config=(tyro.conf.FlagCreatePairsOff,))
    measure(settings, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
