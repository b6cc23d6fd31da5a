#!/usr/bin/env python3
"""Measures a training step against transformers: real pieces a second, and the share of the machine's matrix rate.

    python benchmarks/throughput.py

All sides train on the same batches of real shards, made from the text in the folder that CLOZE_DATA names (or given
with --shards): bf16, dropout, AdamW, a process each. transformers gets what its users have: bf16 autocast over fp32
weights, batches padded to their longest sequence, the fused optimizer; and once more in a process that keeps freed
memory as ours does, to tell what that alone is worth. Steps alternate; ratios are medians. The numbers are kept in
benchmarks/results/throughput-<device>.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import DATA, RESULTS, environment, median_ratio, write_results
from benchmarks.peer import make_shards, padded
from data_prep.shards import Manifest
from pretraining.config.settings import Precision
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.bert import Bert, pretraining_loss
from pretraining.model.shape import Shape
from pretraining.processes.environment import prepare_process
from pretraining.processes.group import choose_device, connect, disconnect
from pretraining.processes.launchers import World
from pretraining.reporting.hardware import matrix_rate, synchronize

LEARNING_RATE = 1e-5
WARM_UP = 2
PROFILED = 2


@dataclass(frozen=True)
class Contest:
    """A model, and the batches that both sides train on."""

    size: str
    length: int
    sequences: int


# 8 sequences of 512 do not fit into 24 GiB on all sides at once
ON_CPU = (Contest("base", 128, 32), Contest("mini", 128, 64), Contest("base", 512, 4))
ON_GPU = (
    Contest("base", 128, 512),
    Contest("large", 128, 256),
    Contest("base", 512, 128),
    Contest("large", 512, 64),
)


@dataclass(frozen=True)
class Throughput:
    """Measures training steps of Cloze and transformers on the same batches."""

    shards: Path | None = None
    """Folder of shards with lengths 128 and 512 (default: made from the real text)."""
    data: Path = DATA
    """Folder of real text with wiki/ and vocab.txt."""
    rounds: int = 3
    """Alternating steps of which the median is taken."""
    alone: bool = False
    """Leave out transformers."""
    only: str | None = None
    """Only contests whose name holds this, such as mini or base-512; the others stay as they are kept."""


class Ours:
    """A step as the trainer does it."""

    def __init__(self, shape: Shape, device: torch.device):
        self.device, self.steps = device, 0
        connect(World(), device)
        settings = EngineSettings(precision=Precision(dtype="bf16"))
        self.engine = Engine(Bert(shape).initialize(0), settings, device)

    def step(self, batch: PretrainingBatch) -> None:
        batches = PretrainingBatches((batch,), len(batch.lengths), len(batch.labels))
        train_step(self.engine, batches, LEARNING_RATE, Seeds.of(0, self.steps, 0), pretraining_loss)
        self.steps += 1
        synchronize(self.device)


class Theirs:
    """A step as users of transformers do it."""

    def __init__(self, shape: Shape, device: torch.device):
        from transformers import BertConfig, BertForPreTraining

        config = BertConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.intermediate,
        )
        self.device = device
        self.model: Any = BertForPreTraining(config).train()
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, batch: PretrainingBatch) -> None:
        inputs = {name: each.to(self.device) for name, each in padded(batch).items()}
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)


SIDES: dict[str, tuple[type[Ours | Theirs], bool]] = {
    "cloze": (Ours, True),
    "transformers": (Theirs, False),
    "transformers, memory kept": (Theirs, True),
}
"""who takes part, and whether its process is prepared as ours is"""


def take_part(side: str, shape: Shape, device: torch.device, pipe: Connection) -> None:
    """A process of one side: takes a batch, answers with the seconds of a step; None asks where the time goes."""
    kind, prepared = SIDES[side]
    if prepared:
        prepare_process()
    contestant = kind(shape, device)
    batch = None
    pipe.send("ready")
    while (received := pipe.recv()) != "end":
        if received is None:
            assert batch is not None
            pipe.send(shares_of_time(partial(contestant.step, batch)))
            continue
        batch = received
        start = time.perf_counter()
        contestant.step(batch)
        pipe.send(time.perf_counter() - start)
    disconnect()


def run_contest(contest: Contest, settings: Throughput, shards: Path, device: torch.device) -> dict[str, Any]:
    """Alternating steps of all sides on the same batches."""
    manifest = Manifest.read(shards)
    shape = Shape.named(contest.size, manifest.vocabulary_size)
    dataset = Dataset(shards, manifest, contest.length)
    order = BatchOrder(Order(0, dataset.shard_rows), contest.sequences)
    batches = [step_batches(dataset, order, step).micro[0] for step in range(WARM_UP + settings.rounds)]
    names = ["cloze"] if settings.alone else list(SIDES)
    pipes, processes = open_sides(names, shape, device)
    ceilings, seconds = [], defaultdict(list)
    for number, batch in enumerate(batches):
        ceilings.append(matrix_rate(device, torch.bfloat16))
        for name, pipe in pipes.items():
            pipe.send(batch)
            taken = pipe.recv()
            if number >= WARM_UP:
                seconds[name].append(taken)
    pipes["cloze"].send(None)
    where = pipes["cloze"].recv()
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send("end")
        process.join()
    ceiling = statistics.median(ceilings)
    padded_pieces = sum(max(each.lengths) * len(each.lengths) for each in batches)
    return {
        "ceiling_gflops": round(ceiling / 1e9),
        "real_share_of_padded": round(sum(len(each.pieces) for each in batches) / padded_pieces, 3),
        **{name: summarise(shape, batches[WARM_UP:], taken, ceiling) for name, taken in seconds.items()},
        "times_as_fast_as": {
            name: round(median_ratio(taken, seconds["cloze"]), 2) for name, taken in seconds.items() if name != "cloze"
        },
        "profile": where,
    }


@contextmanager
def prepared_environment(prepared: bool) -> Iterator[None]:
    """What must be in the environment before a process loads torch."""
    before = dict(os.environ)
    if prepared:
        prepare_process()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def open_sides(names: list[str], shape: Shape, device: torch.device) -> tuple[dict[str, Connection], list[Any]]:
    """A process for each side, all of them ready."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in names:
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=take_part, args=(name, shape, device, theirs), daemon=True))
        with prepared_environment(SIDES[name][1]):
            processes[-1].start()
        theirs.close()
    for pipe in pipes.values():
        assert pipe.recv() == "ready"
    return pipes, processes


def summarise(shape: Shape, batches: list[PretrainingBatch], seconds: list[float], ceiling: float) -> dict[str, float]:
    """Medians over the steps of one side."""
    pieces = [len(batch.pieces) / each for batch, each in zip(batches, seconds, strict=True)]
    flops = [shape.flops(batch.lengths, len(batch.labels)) / each for batch, each in zip(batches, seconds, strict=True)]
    return {
        "real_pieces_per_second": round(statistics.median(pieces)),
        "useful_gflops": round(statistics.median(flops) / 1e9),
        "share_of_ceiling": round(statistics.median(flops) / ceiling, 3),
        "seconds_a_step": round(statistics.median(seconds), 4),
    }


GROUPS = {
    "products of attention": ("aten::bmm", "flash"),
    "matrix products": ("aten::mm", "aten::addmm", "gemm", "nvjet", "cutlass"),
    "softmax and heads of attention": ("_GroupedAttention",),
    "gelu": ("_Gelu",),
    "norms, residuals, dropout": ("_AddAndNorm", "_Drop", "aten::native_layer_norm"),
    "loss over the vocabulary": ("_MaskedLoss",),
    "optimizer": ("aten::_fused_adamw_", "Adam"),
    "sums and copies of gradients": ("aten::add", "aten::copy_", "aten::zero_", "aten::fill_", "aten::clone"),
}


def shares_of_time(step: Callable[[], None]) -> dict[str, float]:
    """Where the time of a step goes, by groups of operations."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            step()
    times: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        group = next((name for name, keys in GROUPS.items() if any(key in event.key for key in keys)), "other")
        times[group] += event.self_device_time_total if cuda else event.self_cpu_time_total
    whole = sum(times.values())
    return {name: round(each / whole, 3) for name, each in sorted(times.items(), key=lambda item: -item[1])}


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Throughput, args=arguments, prog="throughput.py", config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if settings.shards is None and not (settings.data / "wiki").is_dir():
        console.print(f"error: {settings.data} has no wiki/: set CLOZE_DATA, or give --shards or --data")
        return 2
    device = choose_device("auto", World())
    kept = RESULTS / f"throughput-{device.type}.json"
    before = json.loads(kept.read_text())["contests"] if settings.only and kept.exists() else {}
    results: dict[str, Any] = {"environment": describe(device), "contests": before}
    with tempfile.TemporaryDirectory() as folder:
        shards = settings.shards or make_shards(settings.data, Path(folder))
        for contest in ON_GPU if device.type == "cuda" else ON_CPU:
            name = f"{contest.size}-{contest.length}"
            if (settings.only or "") in name:
                found = run_contest(contest, settings, shards, device)
                results["contests"][name] = {"sequences": contest.sequences, **found}
                print_contest(name, found, console)
                console.print(f"  kept in {write_results(kept.stem, results)}")  # after each, since they take minutes
    return 0


def describe(device: torch.device) -> dict[str, Any]:
    """Where it was measured."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {**environment(["torch", "deepspeed", "transformers"]), "threads": torch.get_num_threads(), **gpu}


def print_contest(name: str, found: dict[str, Any], console: Console) -> None:
    """Both sides, and where our time goes."""
    table = Table(name, "real pieces/s", "useful GFLOP/s", f"of {found['ceiling_gflops']:,} GFLOP/s", box=None)
    for side in SIDES:
        if side in found:
            numbers = found[side]
            rates = f"{numbers['real_pieces_per_second']:,}", f"{numbers['useful_gflops']:,}"
            table.add_row(side, *rates, f"{numbers['share_of_ceiling']:.1%}")
    console.print(table)
    for side, ratio in found["times_as_fast_as"].items():
        console.print(f"  {ratio} times as fast as {side}")
    console.print("  our time: " + ", ".join(f"{group} {share:.0%}" for group, share in found["profile"].items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
