#!/usr/bin/env python3
"""Makes two steps of a small model in each way of training, to find faults at once.

    python benchmarks/gpu/smoke.py --shards build/gpu-shards

Each way runs in a process of its own. The exit code is 1 if one of them fails.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.contests import OURS
from benchmarks.measure import run_command, write_results
from benchmarks.sides import open_sides
from benchmarks.throughput import SIDES
from benchmarks.training_sides import Contest
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.engine.precision import choose_dtype
from pretraining.processes.group import choose_device

STEPS = 2
"""The second step shows whether the first one has left a valid state."""


@dataclass(frozen=True)
class Smoke:
    """Makes two steps in each way of training."""

    shards: Path = Path("build/gpu-shards")
    """Folder of shards."""
    contest: str = "mini-128-8"
    """SIZE-LENGTH-SEQUENCES."""
    out: Path | None = None
    """File for the results."""


def list_ways(device: torch.device) -> dict[str, tuple[str, torch.dtype]]:
    """Lists the ways: a side of throughput.py, and its type of numbers."""
    usual = choose_dtype("auto", device)
    found = {name: (name, usual) for name in SIDES if name.startswith(OURS)}
    return found | {"fp16": (OURS, torch.float16)} if device.type == "cuda" else found


def try_way(side: str, dtype: torch.dtype, contest: Contest, shards: Path, device: torch.device) -> dict[str, Any]:
    """Makes steps in a process of their own, since a GPU fault ends its process. Returns seconds and loss."""
    shape, read = contest.open(shards)
    try:
        with open_sides({side: SIDES[side]}, shape, device, dtype) as sides:
            seconds = []
            for step in range(STEPS):
                sides[side].ask("take", read(step))
                seconds.append(round(sides[side].turn("step"), 4))
            loss = sides[side].ask("last_loss")
    except UserError as error:
        return {"failed": str(error)}
    return {"seconds": seconds, "loss": loss, **({} if loss == loss else {"failed": "the loss is no number"})}


def try_all(settings: Smoke, console: Console) -> int:
    """Tries all ways one after another, and prints the results; returns the exit code."""
    device, contest = choose_device("auto", World()), Contest.parse(settings.contest)
    chosen = list_ways(device)
    found: dict[str, dict[str, Any]] = {}
    for name, way in chosen.items():
        each = found[name] = try_way(*way, contest, settings.shards, device)
        console.print(f"{name}: {each.get('failed') or each['seconds']}", markup=False)
    failed = sum("failed" in each for each in found.values())
    if settings.out is not None:
        write_results(settings.out, {"ways": found, "passed": len(found) - failed, "failed": failed})
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(Smoke, try_all)
