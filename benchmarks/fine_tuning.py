#!/usr/bin/env python3
"""Measures fine-tuning against transformers' Trainer: items a second in training and in prediction.

    python benchmarks/fine_tuning.py
    python benchmarks/fine_tuning.py --size base --steps 4 --contests sst2-padded squad-padded --numbers autocast

Both train the same model on the same items of real tasks (from the folder that CLOZE_DATA names; without it, sentences
of the demo corpus), with equal batches, dropout, AdamW and clipping. We pad nothing; the Trainer pads to the longest
sequence that a task allows, or to the longest of a batch with lengths grouped. It computes in bf16 by autocast, and in
fp32. If it is not installed, we are measured alone. A turn is an epoch of some steps; ratios are medians.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.contests import OURS, Turns, alternate
from benchmarks.fine_tuners import PEER, SQUAD, Exercise, Numbers, OurFineTuning, TheirFineTuning
from benchmarks.measure import DATA, ResultsFile, describe_run, run_command
from benchmarks.peer import find_missing_packages
from benchmarks.sides import SideSpec, open_sides
from benchmarks.tables import show_contest
from benchmarks.texts import choose_vocabulary, write_demo_task
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.huggingface.folders import read_shape, write_folder
from pretraining.objectives.declaration import build_model
from pretraining.processes.group import choose_device

WIDTHS = {"sst2": 128, "cola": 128, "squad": 384}
"""The usual width of padded sequences of a task."""
BATCHES = {"sst2": 32, "cola": 32, "squad": 16}
FILES = {"sst2": "glue/SST-2", "cola": "glue/CoLA", "squad": SQUAD}
DEMO = ("demo-padded", "demo-dynamic")
"""Contests on sentences of the demo corpus, in the format of SST-2."""
STEPS = {"tiny": 64, "mini": 64, "small": 16}
"""Steps of an epoch by the size of the model; LEAST_STEPS for larger ones."""
LEAST_STEPS = 4


@dataclass(frozen=True)
class FineTuningSpeed:
    """Measures fine-tuning against transformers' Trainer."""

    model: Path | None = None
    """Folder of a transformers BERT (default: one with fresh weights)."""
    size: str = "mini"
    """Size of the model with fresh weights."""
    data: Path = DATA
    """Folder with glue/, squad/ and vocab.txt."""
    contests: tuple[str, ...] = ()
    """Contests, such as sst2-dynamic; earlier results of others stay (default: all with data, or else those on the demo
    corpus)."""
    numbers: tuple[Numbers, ...] = ("autocast", "fp32")
    """Types of numbers of the Trainer, one after another."""
    steps: int | None = None
    """Steps of a turn (default: by size)."""
    rounds: int = 5
    """Turns for the median."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results)."""


def make_model(size: str, data: Path, folder: Path) -> Path:
    """Writes a transformers folder with fresh weights and the published vocabulary."""
    if size not in BERT.sizes:
        raise UserError(f"--size {size}: is none of {', '.join(BERT.sizes)}")
    vocabulary = choose_vocabulary(data)
    vocabulary.write(folder.with_name("vocabulary"))
    shape = make_shape(size, len(vocabulary))
    weights = build_model(shape).initialize(0).state_dict()
    write_folder(folder, shape, weights, folder.with_name("vocabulary"), "fresh weights\n")
    return folder


def compete(numbers: Numbers, width: int, exercise: Exercise) -> dict[str, Turns]:
    """Lets all sides take turns in training and in prediction; the first turns do not count."""
    kinds = {OURS: SideSpec(OurFineTuning, small_steps=True)}
    if not find_missing_packages(*PEER):
        kinds[PEER[0]] = SideSpec(partial(TheirFineTuning, numbers, width), prepared=False)
    with open_sides(kinds, exercise) as sides:

        def take_turns(method: str) -> Turns:
            return alternate({name: partial(side.ask, method) for name, side in sides.items()}, exercise.epochs - 1, 1)

        return {"training": take_turns("train"), "prediction": take_turns("predict")}


def run_contest(name: str, numbers: Sequence[Numbers], exercise: Exercise) -> dict[str, Any]:
    """Runs a contest against the Trainer with each type of numbers."""
    width = WIDTHS[exercise.task] if name.endswith("-padded") else 0
    against = {each: summarise(compete(each, width, exercise), exercise) for each in numbers}
    return {"batch": exercise.batch, "steps": exercise.steps, "against": against}


def summarise(taken: Mapping[str, Turns], exercise: Exercise) -> dict[str, Any]:
    """Returns items a second of both sides, and how many times as fast we are."""
    items, found = exercise.steps * exercise.batch, dict[str, dict[str, Any]]()
    for what, turns in taken.items():
        medians = {side: turns.summarise_side(side)["median"] for side in turns.seconds}
        found[what] = {f"{side}_items_per_second": round(items / each, 1) for side, each in medians.items()}
        found[what] |= {"times_as_fast": turns.compute_ratio(PEER[0], OURS)} if PEER[0] in turns.seconds else {}
    return found


def measure(settings: FineTuningSpeed, console: Console) -> None:
    """Runs the contests, and writes the results after each, since they take minutes."""
    absent = find_missing_packages(*PEER)
    keeper = ResultsFile("finetuning", ["torch", "deepspeed", *PEER], settings.out)
    models = keeper.earlier.get("models", {})
    if settings.rounds < 1 or (settings.steps or 1) < 1:
        raise UserError("--rounds and --steps: at least 1")
    contests = find_contests(settings, console)
    if absent:
        console.print(f"not installed: {', '.join(absent)}; nothing is compared with")
    with tempfile.TemporaryDirectory() as folder:
        demo = write_demo_task(Path(folder) / "data") if set(contests) & set(DEMO) else None
        model = settings.model or make_model(settings.size, settings.data, Path(folder) / settings.size)
        shape, dtype = read_shape(model), name_dtype(choose_dtype("auto", choose_device("auto", World())))
        found = models.setdefault(model.resolve().name, {"contests": {}})
        found |= {"layers": shape.layers, "hidden": shape.hidden, "dtype": dtype}
        for contest in contests:
            task, data = contest.partition("-")[0], settings.data.resolve()
            if demo is not None and contest in DEMO:
                task, data = "sst2", demo
            steps = settings.steps or STEPS.get(settings.size, LEAST_STEPS)
            exercise = Exercise(task, model, data, BATCHES[task], steps, 1 + settings.rounds)
            name = f"{contest}, alone" if absent else contest  # so that it replaces no ratio
            numbers = settings.numbers[:1] if absent else settings.numbers
            found["contests"][name] = {**run_contest(contest, numbers, exercise), **describe_run()}
            written = keeper.keep({"models": models})
            show_contest(console, name, found["contests"][name])
    console.print(f"kept in {written}")


def find_contests(settings: FineTuningSpeed, console: Console) -> Sequence[str]:
    """Returns the requested contests, or all with data; without any data, those on the demo corpus."""
    known = [f"{task}-{how}" for task in FILES for how in ("padded", "dynamic")]
    there = [name for name in known if (settings.data / FILES[name.partition("-")[0]]).exists()]
    for name in settings.contests:
        if name not in (*known, *DEMO):
            raise UserError(f"--contests {name}: is none of {', '.join((*known, *DEMO))}")
        if name not in (*there, *DEMO):
            raise UserError(f"--contests {name}: {settings.data} has no data for it; set CLOZE_DATA, or give --data")
    if not settings.contests and not there:
        console.print(
            f"{settings.data} has no tasks: the sentences are those of the demo corpus (real ones: CLOZE_DATA)"
        )
    return settings.contests or there or DEMO


if __name__ == "__main__":
    run_command(FineTuningSpeed, measure)
