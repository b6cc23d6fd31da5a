#!/usr/bin/env python3
"""How often a training step waits for the GPU, and in which lines: a host that waits cannot hand out work ahead.

    python benchmarks/waits.py --shards data/wiki --contest large-128-256 --out build/waits.json

Steps of one and of three micro-batches are compared, which tells a wait in each micro-batch from one in each step.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import tyro
from rich.console import Console

from benchmarks.contests import Contest, Ours
from benchmarks.measure import environment, mistakes_told, write_results
from pretraining.processes.group import choose_device, disconnect
from pretraining.processes.launchers import World

WARM_UP, STEPS = 3, 4
SYNCHRONIZING = "called a synchronizing CUDA operation"  # PyTorch's words
CALLS = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))
"""what PyTorch does not warn of, since waiting is all that it does"""


@contextmanager
def waits_counted() -> Iterator[Counter[str]]:
    """Counts where this process waits for the GPU inside of the block, by file and line."""
    places: Counter[str] = Counter()
    with ExitStack() as stack, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for owner, name in CALLS:
            stack.enter_context(patch.object(owner, name, _counting(getattr(owner, name), places)))
        if torch.cuda.is_available():
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        yield places
    for each in warned:
        if SYNCHRONIZING in str(each.message):
            places[f"{each.filename}:{each.lineno}"] += 1


def _counting(function: Callable[..., Any], places: Counter[str]) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        caller = traceback.extract_stack(limit=2)[0]
        places[f"{caller.filename}:{caller.lineno}"] += 1
        return function(*arguments, **named)

    return counted


def count(step: Callable[[int], None]) -> dict[str, Any]:
    """The waits of a step: in each of its micro-batches, and besides. `step` is told how many micro-batches to make."""
    for _ in range(WARM_UP):
        step(1)
    with waits_counted() as one:
        for _ in range(STEPS):
            step(1)
    with waits_counted() as three:
        for _ in range(STEPS):
            step(3)
    each = (three.total() - one.total()) / (2 * STEPS)
    return {"each_micro_batch": each, "each_step": one.total() / STEPS - each, "places": dict(three.most_common())}


@dataclass(frozen=True)
class Waits:
    """Counts where a training step waits for the GPU."""

    shards: Path
    """Folder of shards."""
    out: Path
    """File for what is found."""
    contest: str = "large-128-256"
    """SIZE-LENGTH-SEQUENCES."""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Waits, args=arguments, prog="waits.py")
    console = Console(highlight=False, soft_wrap=True)
    device = choose_device("auto", World())
    shape, batches = Contest.parse(settings.contest).load(settings.shards, 3)
    ours = Ours(shape, device)
    found = count(lambda micro: ours.start_step(batches[:micro]))
    disconnect()
    console.print(
        f"waits for the GPU: {found['each_micro_batch']:g} a micro-batch, {found['each_step']:g} a step besides"
    )
    for place, times in found["places"].items():
        console.print(f"{times:6} {place}")
    results = {"environment": environment(["torch", "deepspeed"]), "contest": settings.contest, **found}
    console.print(f"kept in {write_results(settings.out, results)}")
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
