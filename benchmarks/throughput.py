#!/usr/bin/env python3
"""Measures a training step against transformers: real pieces a second, and the share of the machine's matrix rate.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --contests mini-128-64 --against "cloze, deterministic" --out build/cost.json

All sides train on the same batches of real shards, made from the text in the folder that CLOZE_DATA names (or given
with --shards): bf16 (fp16 on a GPU without it), dropout, AdamW, a process each. transformers gets what its users have:
autocast over fp32 weights, the fused optimizer, batches that are padded and pinned before the step; and once more in a
process that keeps freed memory as ours does, to tell what that alone is worth. Steps alternate; ratios are medians. The
numbers are kept in benchmarks/results/throughput-<device>.json. The second line tells what the same bits cost.
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

from benchmarks.contests import Contest, Ours, Theirs, contest_dtype
from benchmarks.measure import DATA, RESULTS, environment, median_ratio, mistakes_told, write_results
from benchmarks.peer import make_shards
from data_prep.common.errors import UserError
from pretraining.engine.shortage import is_shortage
from pretraining.model.batch import PretrainingBatch
from pretraining.model.shape import Shape
from pretraining.processes.environment import prepare_process
from pretraining.processes.group import choose_device, disconnect
from pretraining.processes.launchers import World
from pretraining.reporting.hardware import matrix_rate

WARM_UP = 2
PROFILED = 2
ON_CPU = ("base-128-32", "mini-128-64", "base-512-4")  # 8 of 512 do not fit into 24 GiB on all sides at once
ON_GPU = ("base-128-512", "large-128-256", "base-512-128", "large-512-64")


@dataclass(frozen=True)
class Throughput:
    """Measures training steps of Cloze and transformers on the same batches."""

    shards: Path | None = None
    """Folder of shards with lengths 128 and 512 (default: made from the real text)."""
    data: Path = DATA
    """Folder of real text with wiki/ and vocab.txt."""
    rounds: int = 3
    """Alternating steps of which the median is taken."""
    against: tuple[str, ...] | None = None
    """Who else trains, such as transformers or "cloze, deterministic" (default: transformers; nothing: nobody)."""
    contests: tuple[str, ...] = ()
    """Each a SIZE-LENGTH-SEQUENCES; what is kept of others stays (default: those for a CPU or a GPU)."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""


SIDES: dict[str, tuple[Callable[[Shape, torch.device], Ours | Theirs], bool]] = {
    "cloze": (Ours, True),
    "cloze, deterministic": (partial(Ours, deterministic=True), True),
    "transformers": (Theirs, False),
    "transformers, memory kept": (Theirs, True),
}
"""who takes part, and whether its process is prepared as ours is"""


def sides_for(settings: Throughput, device: torch.device) -> list[str]:
    """Who takes part. Kept memory is a matter of CPUs: on a GPU, PyTorch keeps it for everyone."""
    peers = ["transformers", "transformers, memory kept"] if device.type == "cpu" else ["transformers"]
    others = peers if settings.against is None else settings.against
    if unknown := [name for name in others if name not in SIDES]:
        raise UserError(f"--against {unknown[0]}: is none of {', '.join(map(repr, SIDES))}")
    return ["cloze", *others]


def take_part(side: str, shape: Shape, device: torch.device, pipe: Connection) -> None:
    """A process of one side: takes a batch, answers with the seconds of a step; None asks where the time goes."""
    kind, prepared = SIDES[side]
    if prepared:
        prepare_process()
    try:
        answer_all(kind(shape, device), pipe)
        disconnect()
    except UserError as error:
        pipe.send(UserError(f"{side}: {error}"))
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        pipe.send(UserError(f"{side}: no memory for such a step; give fewer sequences, as in --contests base-128-8"))


def answer_all(contestant: Ours | Theirs, pipe: Connection) -> None:
    """Answers until the end is told. What a loader would do to a batch is not in the seconds."""
    step = None
    pipe.send("ready")
    while (received := pipe.recv()) != "end":
        if received is None:
            assert step is not None
            pipe.send(shares_of_time(step))
            continue
        step = contestant.prepare(received)
        start = time.perf_counter()
        step()
        pipe.send(time.perf_counter() - start)


def hear(side: str, pipe: Connection) -> Any:
    """What a side answers; UserError where it cannot."""
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise UserError(f"{side}: its process has ended; what it said stands above") from None
    if isinstance(answer, UserError):
        raise answer
    return answer


def run_contest(contest: Contest, settings: Throughput, shards: Path, device: torch.device) -> dict[str, Any]:
    """Alternating steps of all sides on the same batches."""
    shape, batches = contest.load(shards, WARM_UP + settings.rounds)
    pipes, processes = open_sides(sides_for(settings, device), shape, device)
    ceilings, seconds = [], defaultdict(list)
    for number, batch in enumerate(batches):
        ceilings.append(matrix_rate(device, contest_dtype(device)))
        for name, pipe in pipes.items():
            pipe.send(batch)
            taken = hear(name, pipe)
            if number >= WARM_UP:
                seconds[name].append(taken)
    pipes["cloze"].send(None)
    where = hear("cloze", pipes["cloze"])
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
def prepared_environment(prepared: bool, small_steps: bool = False) -> Iterator[None]:
    """What must be in the environment before a process loads torch."""
    before = dict(os.environ)
    if prepared:
        prepare_process(small_steps)
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
    for name, pipe in pipes.items():
        assert hear(name, pipe) == "ready"
    return pipes, processes


def summarise(shape: Shape, batches: list[PretrainingBatch], seconds: list[float], ceiling: float) -> dict[str, float]:
    """Medians over the steps of one side."""
    pieces = [len(batch.pieces) / each for batch, each in zip(batches, seconds, strict=True)]
    flops = [shape.flops(batch.lengths, len(batch.labels)) / each for batch, each in zip(batches, seconds, strict=True)]
    return {
        "sequences_per_second": round(
            statistics.median(len(batch.lengths) / each for batch, each in zip(batches, seconds, strict=True)), 1
        ),
        "real_pieces_per_second": round(statistics.median(pieces)),
        "useful_gflops": round(statistics.median(flops) / 1e9),
        "share_of_ceiling": round(statistics.median(flops) / ceiling, 3),
        "seconds_a_step": round(statistics.median(seconds), 4),
    }


GROUPS = {
    "products of attention": ("aten::bmm", "flash", "fmha"),
    "matrix products": ("aten::mm", "aten::addmm", "gemm", "nvjet", "cutlass"),
    "softmax and heads of attention": ("_GroupedAttention",),
    "gelu": ("_Gelu", "GeluCUDAKernel", "GeluBackwardCUDAKernel"),
    "norms, residuals, dropout": ("_AddAndNorm", "_Drop", "aten::native_layer_norm", "layer_norm", "dropout"),
    "loss over the vocabulary": ("_MaskedLoss", "softmax", "nll_loss"),
    "optimizer": ("aten::_fused_adamw_", "Adam"),
    "sums and copies of gradients": ("aten::add", "aten::copy_", "aten::zero_", "aten::fill_", "aten::clone"),
}
"""Names of operations on a CPU and of kernels on a GPU, or parts of them; the first group that knows a name has it."""


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
    kept = settings.out or RESULTS / f"throughput-{device.type}.json"
    before = json.loads(kept.read_text())["contests"] if settings.contests and kept.exists() else {}
    where = {**environment(["torch", "deepspeed", "transformers"]), "threads": torch.get_num_threads()}
    results: dict[str, Any] = {"environment": where, "contests": before}
    contests = [Contest.parse(each) for each in settings.contests or (ON_GPU if device.type == "cuda" else ON_CPU)]
    with tempfile.TemporaryDirectory() as folder:
        shards = settings.shards or make_shards(settings.data, Path(folder) / "shards")
        for contest in contests:
            found = run_contest(contest, settings, shards, device)
            results["contests"][contest.name] = {"sequences": contest.sequences, **found}
            print_contest(contest.name, found, console)
            console.print(f"  kept in {write_results(kept, results)}")  # after each, since they take minutes
    return 0


def print_contest(name: str, found: dict[str, Any], console: Console) -> None:
    """Both sides, and where our time goes."""
    table = Table(
        name, "sequences/s", "real pieces/s", "useful GFLOP/s", f"of {found['ceiling_gflops']:,} GFLOP/s", box=None
    )
    for side in SIDES:
        if side in found:
            numbers = found[side]
            rates = [f"{numbers[key]:,}" for key in ("sequences_per_second", "real_pieces_per_second", "useful_gflops")]
            table.add_row(side, *rates, f"{numbers['share_of_ceiling']:.1%}")
    console.print(table)
    for side, ratio in found["times_as_fast_as"].items():
        console.print(f"  {ratio} times as fast as {side}")
    console.print("  our time: " + ", ".join(f"{group} {share:.0%}" for group, share in found["profile"].items()))


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
