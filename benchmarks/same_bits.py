#!/usr/bin/env python3
"""Measures what `parallel.same_bits` costs: training steps with and without it take turns, on 1 and 2 processes.

    python benchmarks/same_bits.py

All processes together have two micro-batches in a step, as bert_mini's recipe has. The numbers are kept in
benchmarks/results/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import json
import os
import tempfile
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.contests import Turns, alternate
from benchmarks.measure import ResultsFile, run_command
from benchmarks.processes import launch
from benchmarks.tables import build_table, show
from benchmarks.texts import find_shards
from benchmarks.training_sides import Contest, Training
from data_prep.common.launchers import find_world
from pretraining.config.settings import Parallel, Precision
from pretraining.data.batches import step_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.processes.group import choose_device, connect, default_threads, disconnect
from pretraining.reporting.hardware import synchronize

CONTESTS = ("mini-128-128", "base-128-16")
PROCESSES = (1, 2)
MICRO_BATCHES = 2
WARM_UP, ROUNDS = 2, 12
WITH, WITHOUT = "same bits", "without"


@dataclass(frozen=True)
class SameBits:
    """Measures training steps with parallel.same_bits beside those without."""

    notes: Path | None = None
    """Run as a rank of a launch, and write the seconds of the contests to this file."""
    contests: tuple[str, ...] = CONTESTS
    """Models and steps, as SIZE-LENGTH-SEQUENCES."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""


def take_part(contest: Contest, shards: Path) -> dict[str, list[float]]:
    """Makes the steps of one rank of a launch, both kinds in turns; returns the seconds of each."""
    world, device = find_world(os.environ), choose_device("auto", find_world(os.environ))
    connect(world, device)
    torch.set_num_threads(default_threads(world))
    dataset = Dataset(Corpora.one(shards), contest.length, rank=world.rank, ranks=world.size)
    order = BatchOrder(Order(0, dataset.shard_rows), contest.sequences)
    batches = [step_batches(dataset, order, step, world.rank, world.size, MICRO_BATCHES) for step in range(3)]
    precision, sides = Precision(dtype=name_dtype(choose_dtype("auto", device))), {}

    def make_step(training: Training) -> None:
        training.step(batches[training.steps % len(batches)])
        synchronize(device)
        dist.barrier()

    for name in (WITHOUT, WITH):
        settings = EngineSettings(precision=precision, parallel=Parallel(same_bits=name == WITH))
        shape = contest.make_shape(dataset.vocabulary_size)
        sides[name] = partial(make_step, Training(shape, settings, device, rank=world.rank))
    found = {name: [*seconds] for name, seconds in alternate(sides, ROUNDS, WARM_UP).seconds.items()}
    disconnect()
    return found


def measure(settings: SameBits, console: Console) -> None:
    """Measures, prints the table, and keeps it; or takes part in a launch."""
    shards = find_shards(None, console.print)
    if settings.notes is not None:
        found = take_part(Contest.parse(settings.contests[0]), shards)
        if find_world(os.environ).rank == 0:
            settings.notes.write_text(json.dumps(found))
        return
    rows, keeper = [], ResultsFile("same_bits", ["torch", "deepspeed"], settings.out)
    for contest in settings.contests:
        for processes in PROCESSES:
            with tempfile.TemporaryDirectory() as folder:
                notes = Path(folder) / "seconds.json"
                launch(processes, __file__, "--notes", str(notes), "--contests", contest)
                turns = Turns(json.loads(notes.read_text()))
            ratio = turns.compute_ratio(WITH, WITHOUT)
            of_each = {f"seconds {name}": turns.summarise_side(name) for name in turns.seconds}
            rows.append({"step": contest, "processes": processes, **of_each, "times": ratio})
    show(console, [build_table("Steps with parallel.same_bits", rows)])
    console.print(f"kept in {keeper.keep({'rows': rows})}", markup=False)


if __name__ == "__main__":
    run_command(SameBits, measure)
