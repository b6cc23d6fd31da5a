#!/usr/bin/env python3
"""Measures what our own way with gradients under ZeRO 1 is worth, beside DeepSpeed's ways with its settings.

    python benchmarks/gradients.py
    torchrun --nproc-per-node 2 benchmarks/gradients.py --shards SHARDS --contest base-128-8

Whole training steps of engines in one process alternate, on the same batches of real shards; ratios are medians. The
model, the kernels and the optimizer are the same on both sides. Kept in benchmarks/results/.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import torch.distributed as dist
import tyro

from benchmarks.contests import LEARNING_RATE, Contest
from benchmarks.measure import (
    DATA,
    alternate,
    median_ratio,
    mistakes_told,
    read_results,
    record,
    results_file,
    write_results,
)
from benchmarks.peer import make_shards
from pretraining.config.settings import Dtype, Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.bert import Bert, pretraining_loss
from pretraining.model.shape import Shape
from pretraining.processes.group import choose_device, connect, default_threads, disconnect
from pretraining.processes.launchers import find_world
from pretraining.reporting.hardware import synchronize

WARM_UP = 2


@dataclass(frozen=True)
class Way:
    """A way of DeepSpeed's with gradients."""

    dtype: Dtype = "bf16"
    zero: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """its own settings"""


WAYS = {
    "ZeRO 1 in bf16": Way(),
    "ZeRO 1 in bf16, added after the backward pass": Way(
        options={"bf16": {"enabled": True, "immediate_grad_update": False}}
    ),
    "ZeRO 2 in bf16": Way(zero=2),
    "ZeRO 2 in bf16, gradients not contiguous": Way(
        zero=2, options={"zero_optimization": {"contiguous_gradients": False}}
    ),
    "ZeRO 2 in bf16, buckets of 20 million": Way(
        zero=2, options={"zero_optimization": {"reduce_bucket_size": 20_000_000}}
    ),
    "ZeRO 2 in bf16, joined during the backward pass": Way(
        zero=2, options={"zero_optimization": {"overlap_comm": True}}
    ),
    "ZeRO 1 in fp32": Way("fp32"),
}


@dataclass(frozen=True)
class Gradients:
    """Measures steps with our way with gradients and with DeepSpeed's."""

    contest: str = "base-128-32"
    """SIZE-LENGTH-SEQUENCES; so many sequences in a micro-batch of each rank."""
    micro: int = 1
    """Micro-batches of a step."""
    rounds: int = 5
    """Alternating steps of which the median is taken."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Ways of DeepSpeed's to compare with."""
    shards: Path | None = None
    """Folder of shards (default: made from the real text)."""
    data: Path = DATA
    """Folder of real text with wiki/ and vocab.txt."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""


def make_engine(shape: Shape, way: Way, device: torch.device, ours: bool) -> Engine:
    """An engine with gradients as DeepSpeed itself handles them, or as we do under ZeRO 1."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    settings = EngineSettings(
        precision=Precision(dtype=way.dtype),
        parallel=Parallel(zero=1 if ours else way.zero),
        deepspeed={} if ours else way.options,
    )
    with ExitStack() as stack:
        if not ours:
            stack.enter_context(mock.patch("pretraining.engine.gradients.EngineWithZero1", DeepSpeedEngine))
        return Engine(Bert(shape).initialize(0), settings, device)


def stepper(engine: Engine, micro: list[PretrainingBatch]) -> Callable[[], None]:
    """What makes a step of an engine on these micro-batches, and waits until all ranks have made theirs."""
    ranks, steps = dist.get_world_size(), iter(range(1 << 30))
    sequences, labels = sum(len(each.lengths) for each in micro), sum(len(each.labels) for each in micro)
    batches = PretrainingBatches(tuple(micro), ranks * sequences, ranks * labels)

    def step() -> None:
        seeds = Seeds.of(0, next(steps), dist.get_rank())
        train_step(engine, batches, LEARNING_RATE, seeds, pretraining_loss)
        synchronize(engine.device)
        dist.barrier()

    return step


def compare(way: Way, shape: Shape, micro: list[PretrainingBatch], device: torch.device, rounds: int) -> float:
    """How many times as long a step takes with DeepSpeed's way as with ours."""
    engines = {
        "theirs": make_engine(shape, way, device, ours=False),
        "ours": make_engine(shape, way, device, ours=True),
    }
    steppers = {name: stepper(engine, micro) for name, engine in engines.items()}
    alternate(steppers, WARM_UP)
    seconds = alternate(steppers, rounds).seconds
    for engine in engines.values():
        engine.close()
    return median_ratio(seconds["theirs"], seconds["ours"])


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Gradients, args=arguments, prog="gradients.py")
    world = find_world(os.environ)
    device = choose_device("auto", world)
    connect(world, device)
    torch.set_num_threads(default_threads(world))
    with tempfile.TemporaryDirectory() as folder:
        shards = settings.shards or make_shards(settings.data, Path(folder) / "shards")
        shape, batches = Contest.parse(settings.contest).load(shards, world.size * settings.micro)
    micro = batches[world.rank :: world.size]
    kept = settings.out or results_file("gradients")
    contests = read_results(kept)["contests"] if kept.exists() else {}
    results = record("gradients", ["torch", "deepspeed"], {"contests": contests})
    for name in settings.ways:
        ratio = compare(WAYS[name], shape, micro, device, settings.rounds)
        if world.rank == 0:
            print(f"{name}: ours is {ratio:.2f} times as fast", flush=True)
            key = f"{settings.contest}, {settings.micro} micro-batches, {world.size} ranks"
            found = contests.setdefault(key, {"times_as_fast_as": {}})
            found["times_as_fast_as"][name] = round(ratio, 2)
            write_results(kept, results)
    disconnect()
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
