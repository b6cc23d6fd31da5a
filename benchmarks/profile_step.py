#!/usr/bin/env python3
"""Which operations take the time of a training step: shares by groups, a table, and a trace to open in a browser.

    python benchmarks/profile_step.py --shards data/wiki --out build/shares.json --folder build/profile

Writes table.txt and trace.json.gz, which chrome://tracing and ui.perfetto.dev open, into the folder.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pretraining.processes.environment import prepare_process

prepare_process()  # before torch is loaded

import torch
import tyro
from rich.console import Console

from benchmarks.contests import Contest, Ours
from benchmarks.measure import environment, mistakes_told, write_results
from benchmarks.throughput import shares_of_time
from pretraining.processes.group import choose_device, disconnect
from pretraining.processes.launchers import World
from pretraining.training.profiling import FOLDER, SKIPPED, TABLE, TRACE, step_profile


def write_profile(step: Callable[[], None], folder: Path, device: torch.device, console: Console) -> None:
    """Profiles one step, after some that compile and allocate."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        with step_profile(Path(scratch), 1, device, console.print) as profiled:
            for _ in range(SKIPPED + 2):
                step()
                profiled.step()
        written = Path(scratch) / FOLDER
        shutil.copy(written / TABLE, folder / TABLE)
        with (written / TRACE).open("rb") as trace, gzip.open(folder / f"{TRACE}.gz", "wb") as packed:
            shutil.copyfileobj(trace, packed)


@dataclass(frozen=True)
class ProfileStep:
    """Profiles a training step."""

    shards: Path
    """Folder of shards."""
    folder: Path
    """Folder for the table and the trace."""
    out: Path
    """File for the shares."""
    contest: str = "base-128-32"
    """SIZE-LENGTH-SEQUENCES."""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(ProfileStep, args=arguments, prog="profile_step.py")
    console = Console(highlight=False, soft_wrap=True)
    device = choose_device("auto", World())
    shape, [batch] = Contest.parse(settings.contest).load(settings.shards, 1)
    step = partial(Ours(shape, device).step, batch)
    write_profile(step, settings.folder, device, console)
    shares = shares_of_time(step)
    disconnect()
    console.print((settings.folder / TABLE).read_text(), markup=False)
    console.print(", ".join(f"{group} {share:.1%}" for group, share in shares.items()))
    found = {"environment": environment(["torch"]), "contest": settings.contest, "shares": shares}
    console.print(f"kept in {write_results(settings.out, found)}, {settings.folder}")
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
