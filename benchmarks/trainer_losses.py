#!/usr/bin/env python3
"""Compares the losses of our fine-tuning with those of transformers' Trainer, step by step, on a task of GLUE.

    python benchmarks/trainer_losses.py
    python benchmarks/trainer_losses.py --task stsb --model exported/mini --learning-rate 1e-4

First all is the same: weights, batches, settings, fp32, no dropout; the losses of all steps then must be too. Then
what both do differently by default is put back, one thing at a time, and a table says how far the losses go apart.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import tempfile
from dataclasses import dataclass, replace

from rich.console import Console

from benchmarks.fine_tuning import make_model
from benchmarks.loss_sides import DIFFERENCES, Known, Trial, compared, differences_of
from benchmarks.measure import DATA, Keeper, results_file, run_command
from benchmarks.peer import hush, require
from benchmarks.tables import matrix, show
from data_prep.common.errors import UserError

PEER = ("transformers", "accelerate")


@dataclass(frozen=True)
class TrainerLosses:
    """Compares the losses of fine-tuning with those of transformers' Trainer."""

    task: str = "rte"
    """A task of GLUE that is in the folder of the data."""
    model: Path | None = None
    """Folder of a BERT of transformers (default: one with fresh weights)."""
    size: str = "tiny"
    """Its size, where none is given."""
    data: Path = DATA
    """Folder with glue/ and vocab.txt."""
    steps: int = 50
    """Steps that are compared, of 32 items each."""
    learning_rate: float = 1e-3
    """Highest learning rate: one at which fresh weights learn something in these steps."""
    only: tuple[str, ...] = ()
    """Beginnings of the names of differences (default: all)."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results, by task and hardware)."""


def measure(settings: TrainerLosses, console: Console) -> None:
    """Goes through the differences, and keeps what is found after each."""
    require(*PEER)
    hush()
    known: Known = {}
    out = settings.out or results_file(f"trainer-losses-{settings.task}", with_gpu=False)
    keeper, rows = Keeper("trainer_losses", ["torch", "deepspeed", *PEER], out, with_gpu=False), []
    with tempfile.TemporaryDirectory() as folder:
        model = settings.model or make_model(settings.size, settings.data, Path(folder) / settings.size)
        trial = Trial(settings.task, model, settings.data, settings.steps, settings.learning_rate, Path(folder))
        about = {"task": settings.task, "model": model.name, "steps": settings.steps}
        names = [
            name for name in differences_of(trial.task.head.kind) if not settings.only or name.startswith(settings.only)
        ]
        if not names:
            raise UserError(f"--only {' '.join(settings.only)}: begins none of {', '.join(DIFFERENCES)}")
        for name in names:
            rows.append({"what differs": name, **compared(replace(trial, difference=DIFFERENCES[name]), known)})
            show(console, [matrix("", rows[-1:])])
            written = keeper.keep({**about, "learning_rate": settings.learning_rate, "differences": rows})
    console.print(f"kept in {written}")


if __name__ == "__main__":
    run_command(TrainerLosses, measure)
