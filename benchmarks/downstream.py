#!/usr/bin/env python3
"""Scores a pre-trained model on real tasks: beside the same sizes without pre-training, and beside transformers.

    python benchmarks/downstream.py --model runs/mini/export
    python benchmarks/downstream.py --model runs/mini/export --parts cola rte

Three sides get the same items, settings and seeds: our commands on the model, our commands with fresh weights of its
sizes, and transformers' Trainer on the model, with batches padded to their longest item. Scores are those of dev after
the last step, one for each seed. What is done is kept in the folder of work, so that the same command goes on where it
was stopped; the scores go to benchmarks/results/ after every part, and those of other parts stay there.
SWAG's few rows show that it runs, no more.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import DATA, leave_own_folder, mistakes_told, read_results, record, results_file, write_results

leave_own_folder()

import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import trainer_peer
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json
from finetuning.inputs import Cutter
from finetuning.model.models import find_model
from finetuning.run_glue import RunGlue
from finetuning.run_squad import RunSquad
from finetuning.run_swag import RunSwag
from finetuning.session.command import Command
from finetuning.session.session import SMALL
from finetuning.settings import load_settings
from pretraining.engine.precision import choose_dtype
from pretraining.huggingface.folders import read_shape
from pretraining.processes.group import choose_device
from pretraining.processes.launchers import World
from pretraining.processes.outliving import end_with_parent

ROOT = Path(__file__).parent.parent
SIDES = ("pre-trained", "from scratch", "transformers")


@dataclass(frozen=True)
class Part:
    """A task, and the command that does it."""

    kind: type[Command]
    data: str
    """Its folder of data."""
    seeds: int
    given: Mapping[str, Any] = field(default_factory=dict)
    """What the command is told."""

    def words(self) -> list[str]:
        """What it is told, as a user types it."""
        words = [str(ROOT / "finetuning" / f"run_{self.kind.__name__.removeprefix('Run').lower()}.py")]
        for name, value in self.given.items():
            words += [f"--{name}", *(value if isinstance(value, tuple) else (value,))]
        return words


PARTS = {
    "sst2": Part(RunGlue, "glue", 1, {"task": ("sst2",)}),
    "cola": Part(RunGlue, "glue", 3, {"task": ("cola",)}),
    "stsb": Part(RunGlue, "glue", 3, {"task": ("stsb",)}),
    "rte": Part(RunGlue, "glue", 3, {"task": ("rte",)}),
    "squad1": Part(RunSquad, "squad", 1, {"version": "1.1"}),
    "squad2": Part(RunSquad, "squad", 1, {"version": "2.0"}),
    "swag": Part(RunSwag, "swag", 1),
}


@dataclass(frozen=True)
class Downstream:
    """Scores a pre-trained model on real tasks, beside one without pre-training and beside transformers."""

    model: Path
    """Folder of transformers with the pre-trained model."""
    data: Path = DATA
    """Folder with glue/, squad/ and swag/."""
    parts: tuple[str, ...] = tuple(PARTS)
    """Which tasks; what is kept of others stays."""
    learning_rate: float = 1e-4
    """The same for all, in the middle of what suits miniatures; a larger model takes 3e-5."""
    epochs: float | None = None
    """How often items are gone through (default: as the recipe of the task says)."""
    work: Path = Path("runs/downstream")
    """Folder for what every run writes."""
    out: Path = field(default_factory=partial(results_file, "downstream"))
    """File for the scores."""

    def overrides(self, part: Part) -> list[str]:
        """The settings that all sides have, as our commands take them."""
        return [
            *(f"--learning-rates {self.learning_rate} --seeds {part.seeds} --search.jobs 1".split()),
            *([] if self.epochs is None else ["--epochs", str(self.epochs)]),
        ]

    def folder(self, name: str, side: str) -> Path:
        """Where a side works on a part."""
        return self.work.resolve() / name_of(self.model) / name / side.replace(" ", "-")


def name_of(model: Path) -> str:
    """What a model is called: an export as its run."""
    return find_model(str(model)).summary().name


def run_ours(settings: Downstream, name: str, side: str) -> dict[str, Any]:
    """One of our commands; it goes on by itself where it was stopped."""
    part, out = PARTS[name], settings.folder(name, side)
    words = ["--model", settings.model, "--data", settings.data / part.data, "--out", out, *settings.overrides(part)]
    words += ["--from-scratch"] * (side == "from scratch")
    done = subprocess.run([sys.executable, *part.words(), *map(str, words)], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"{name}, {side}: its command ended with {done.returncode}; what it said stands above")
    [task] = read_json(out / "results.json").values()
    runs = list(task["runs"].values())
    scores = [run["score"] for run in runs]
    return {"metric": task["metric"], "scores": scores, "seconds": round(sum(run.get("seconds", 0) for run in runs))}


def run_theirs(settings: Downstream, name: str, side: str) -> dict[str, Any]:
    """transformers' Trainer with every seed, each in a process of its own; those that are done are not done again."""
    part, folder = PARTS[name], settings.folder(name, side)
    for seed in range(1, 1 + part.seeds):
        if not (folder / f"seed{seed}.json").exists():
            process = multiprocessing.get_context("spawn").Process(target=train_theirs, args=(settings, name, seed))
            process.start()
            process.join()
            if process.exitcode:
                raise UserError(f"{name}, {side}: seed {seed} ended with {process.exitcode}; what it said stands above")
    runs = [read_json(folder / f"seed{seed}.json") for seed in range(1, 1 + part.seeds)]
    if any(run["settings"] != told(settings) for run in runs):
        raise UserError(f"{folder}: holds runs with other settings; name another folder with --work, or remove it")
    seconds = round(sum(run["seconds"] for run in runs))
    return {"metric": runs[0]["metric"], "scores": [run["score"] for run in runs], "seconds": seconds}


def told(settings: Downstream) -> dict[str, Any]:
    """The settings that a run of the Trainer depends on."""
    return {"learning_rate": settings.learning_rate, "epochs": settings.epochs}


def train_theirs(settings: Downstream, name: str, seed: int) -> None:
    """Trains with one seed and scores dev, as our command would: its settings, its items, its figures."""
    end_with_parent(signal.SIGKILL)  # what is half trained is worth nothing
    part = PARTS[name]
    command = part.kind(model=str(settings.model), data=settings.data / part.data, **part.given)  # type: ignore[call-arg]
    normal, small = command.recipes
    recipe = small if read_shape(settings.model).hidden < SMALL else normal
    overrides = [f"--seed={seed}", f"--learning_rate={settings.learning_rate}"]
    of_all = load_settings(recipe, [*overrides, *([] if settings.epochs is None else [f"--epochs={settings.epochs}"])])
    [task] = command.open_tasks(of_all, Cutter(find_model(str(settings.model)).vocabulary))
    fast = choose_dtype(of_all.precision.dtype, choose_device("auto", World()))
    numbers: trainer_peer.Numbers = "autocast" if fast == torch.bfloat16 else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_peer.make_trainer(task, settings.model, Path(folder), of_all, numbers=numbers)
        begin = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - begin
        split, items = next(iter(task.dev.items()))
        score = task.score(split, trainer_peer.outputs_of(trainer, items, task.head.kind))[task.metric]
    found = {"metric": task.metric, "score": score, "seconds": seconds, "settings": told(settings)}
    target = settings.folder(name, "transformers") / f"seed{seed}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, found)


def measure(settings: Downstream, console: Console) -> dict[str, Any]:
    """Goes through the parts, and keeps what is found after each."""
    if unknown := [name for name in settings.parts if name not in PARTS]:
        raise UserError(f"--parts {unknown[0]}: is none of {', '.join(PARTS)}")
    results = read_results(settings.out) if settings.out.exists() else {}
    model = {"name": name_of(settings.model), **budget(settings.model)}
    if results.get("model", model) != model:
        raise UserError(f"{settings.out}: holds the scores of another model; name another file with --out")
    parts = results.get("parts", {})
    libraries = ["torch", "deepspeed", "transformers", "accelerate"]
    results = record("downstream", libraries, {"model": model, "parts": parts})
    for name in settings.parts:
        sides = {}
        for side in SIDES:
            console.print(f"{name}, {side}")
            found = (run_theirs if side == "transformers" else run_ours)(settings, name, side)
            scores = [score for score in found["scores"] if score is not None]
            figures = {"median": statistics.median(scores), "spread": [min(scores), max(scores)]} if scores else {}
            sides[side] = {**found, **figures}
        parts[name] = {"settings": told(settings), **sides}
        write_results(settings.out, results)
    return results


def budget(model: Path) -> dict[str, Any]:
    """What is known of how a model was made: what its card says of the training, and how long the steps took."""
    card = model / "README.md"
    section = card.read_text().partition("## Training\n")[2].partition("\n## ")[0] if card.exists() else ""
    known: dict[str, Any] = {"training": [line for line in section.splitlines() if line]}
    metrics = model.resolve().parent / "metrics.jsonl"
    if metrics.exists():
        steps = [json.loads(line) for line in metrics.read_text().splitlines() if '"kind": "step"' in line]
        at = [0, *(each["step"] for each in steps)]
        lasted = sum(
            (now - then) * each["seconds_per_step"] for then, now, each in zip(at, at[1:], steps, strict=False)
        )
        known["training_hours"] = round(lasted / 3600, 2)
    return known


def table(results: Mapping[str, Any]) -> Table:
    """The median of every side, with the spread where there are several seeds."""
    made = Table("task", "metric", "seeds", *SIDES, box=None)
    for name, part in results["parts"].items():
        cells = [_cell(part[side]) for side in SIDES]
        made.add_row(name, part[SIDES[0]]["metric"], str(len(part[SIDES[0]]["scores"])), *cells)
    return made


def _cell(found: Mapping[str, Any]) -> str:
    if "median" not in found:
        return "failed"
    low, high = found["spread"]
    return f"{100 * found['median']:.1f}" + (f" ({100 * low:.1f} to {100 * high:.1f})" if low < high else "")


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Downstream, args=arguments, prog="downstream.py", config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    results = measure(settings, console)
    console.print(table(results))
    console.print(f"kept in {settings.out}")
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
