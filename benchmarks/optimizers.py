#!/usr/bin/env python3
"""Measures what a step of each optimizer takes on a base, beside our AdamW: from the gradients to the moved weights.

    python benchmarks/optimizers.py

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
from benchmarks.measure import ResultsFile, run_command
from benchmarks.tables import build_table, show
from benchmarks.texts import find_shards
from benchmarks.training_sides import Contest, Training, join_micro_batches
from data_prep.common.launchers import World
from pretraining.config.settings import Optimizer, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.batch import PretrainingBatches
from pretraining.optimizers.declaration import DEFAULT, optimizers
from pretraining.processes.group import choose_device, connect, disconnect
from pretraining.reporting.hardware import synchronize

CONTEST = Contest("base", 128, 2)
"""The model, and the batch that all train on, whose passes are not counted."""
WARM_UP, ROUNDS = 2, 9
"""Steps that do not count, and those of which the median is taken: many, since a step of AdamW takes 0.1 s."""


@dataclass(frozen=True)
class Optimizers:
    """Measures what a step of each optimizer takes, beside AdamW."""

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


def compare(device: torch.device, console: Console) -> Turns:
    """Lets all optimizers take turns."""
    shape, read = CONTEST.open(find_shards(None, console.print))
    dtype = name_dtype(choose_dtype("auto", device))
    batches, sides = join_micro_batches([read(0)]), {}
    for name in dict.fromkeys((DEFAULT, *optimizers())):
        own = EngineSettings(optimizer=Optimizer(name=name), precision=Precision(dtype=dtype))
        sides[name] = TimedSteps(Training(shape, own, device), batches)
    return alternate(sides, ROUNDS, WARM_UP)


def measure(settings: Optimizers, console: Console) -> None:
    """Measures, prints the table, and keeps it."""
    device = choose_device("auto", World())
    keeper = ResultsFile("optimizers", ["torch"], settings.out)
    connect(World(), device)
    try:
        turns = compare(device, console)
    finally:
        disconnect()
    rows = []
    for name in turns.seconds:
        seconds, ratio = turns.summarise_side(name), turns.compute_ratio(name, DEFAULT)
        rows.append({"optimizer": name, "seconds_a_step": seconds, f"times_{DEFAULT}": ratio})
    show(console, [build_table(f"Steps of optimizers on {CONTEST.size}", rows)])
    console.print(f"kept in {keeper.keep({'size': CONTEST.size, 'rows': rows})}", markup=False)


if __name__ == "__main__":
    run_command(Optimizers, measure)
