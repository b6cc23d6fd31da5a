#!/usr/bin/env python3
"""Measures what a step of each optimizer takes, beside our AdamW: from the gradients to the moved weights.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --size mini --optimizers adamw lamb --rounds 15

All train the same model on the same batch, a short one, whose passes are not counted. A step has the norm of the
gradients, their clipping, the move of the weights, and their copy in 16 bits. The numbers are kept in
benchmarks/results/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import time
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks.contests import Turns, alternate
from benchmarks.measure import DATA, ResultsFile, run_command
from benchmarks.tables import build_table, show
from benchmarks.texts import find_shards
from benchmarks.training_sides import Contest, Training, join_micro_batches
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.config.settings import Optimizer, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.batch import PretrainingBatches
from pretraining.optimizers.declaration import DEFAULT, optimizers
from pretraining.processes.group import choose_device, connect, disconnect
from pretraining.reporting.hardware import synchronize

LENGTH, SEQUENCES = 128, 2
"""The batch that all train on, whose passes are not counted."""
WARM_UP = 2


@dataclass(frozen=True)
class Optimizers:
    """Measures what a step of each optimizer takes, beside AdamW."""

    shards: Path | None = None
    """Folder of shards (default: made of real text, or of the corpus that is built in)."""
    size: str = "base"
    """Size of the model."""
    optimizers: tuple[str, ...] = ("lamb", "muon")
    """Who takes turns with AdamW."""
    rounds: int = 9
    """Alternating steps of which the median is taken."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""


class TimedSteps:
    """A model in training with one optimizer, whose steps are timed."""

    def __init__(self, training: Training, batches: PretrainingBatches):
        self.training, self.batches, self.seconds = training, batches, 0.0
        self._step, training.engine.step = training.engine.step, self._timed  # type: ignore[method-assign]

    def _timed(self, learning_rate: float) -> None:
        device = self.training.engine.device
        synchronize(device)
        start = time.perf_counter()
        self._step(learning_rate)
        synchronize(device)
        self.seconds = time.perf_counter() - start

    def __call__(self) -> float:
        """Makes a step of training; returns the seconds of the optimizer's part."""
        self.training.step(self.batches)
        return self.seconds


def compare(settings: Optimizers, device: torch.device, console: Console) -> Turns:
    """Lets the optimizers take turns."""
    contest = Contest(settings.size, LENGTH, SEQUENCES)
    shape, read = contest.open(find_shards(settings.shards, DATA, console.print))
    dtype = name_dtype(choose_dtype("auto", device))
    batches, sides = join_micro_batches([read(0)]), {}
    for name in dict.fromkeys((DEFAULT, *settings.optimizers)):
        own = EngineSettings(optimizer=Optimizer(name=name), precision=Precision(dtype=dtype))
        sides[name] = TimedSteps(Training(shape, own, device), batches)
    return alternate(sides, settings.rounds, WARM_UP)


def measure(settings: Optimizers, console: Console) -> None:
    """Measures, prints the table, and keeps it."""
    unknown = [name for name in settings.optimizers if name not in optimizers()]
    if unknown or settings.size not in BERT.sizes or settings.rounds < 1:
        raise UserError(
            f"--optimizers: of {', '.join(optimizers())}; --size: of {', '.join(BERT.sizes)}; --rounds from 1 on"
        )
    device = choose_device("auto", World())
    keeper = ResultsFile("optimizers", ["torch"], settings.out, device.type == "cuda")
    if keeper.earlier.get("size", settings.size) != settings.size:
        raise UserError(f"{keeper.path}: has the steps of {keeper.earlier['size']}; give another file as --out")
    connect(World(), device)
    try:
        turns = compare(settings, device, console)
    finally:
        disconnect()
    rows = [
        {
            "optimizer": name,
            "seconds_a_step": turns.summarise_side(name),
            f"times_{DEFAULT}": turns.compute_ratio(name, DEFAULT),
        }
        for name in turns.seconds
    ]
    show(console, [build_table(f"Steps of optimizers on {settings.size}", rows)])
    console.print(f"kept in {keeper.keep({'size': settings.size, 'rows': rows})}", markup=False)


if __name__ == "__main__":
    run_command(Optimizers, measure)
