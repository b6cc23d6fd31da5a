#!/usr/bin/env python3
"""What each part of a run costs as ranks grow in number: simulated on one machine, with the code that a run uses.

    python benchmarks/ranks.py --shards data/wiki

Ranks are threads of a few processes that meet in a real store, beat, vote over real connections, and read a checkpoint
that as many ranks have written. Where this user may, all of it runs in a network of its own: PyTorch's store asks the
name server for the name behind each connection, which is not what is measured here. `docs/cluster.md` has the results.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import leave_own_folder, mistakes_told, read_results, record, results_file, write_results
from pretraining.processes.environment import prepare_process

prepare_process()
leave_own_folder()

import torch
import tyro
from rich.console import Console

from benchmarks.scale.beats import measure_beats
from benchmarks.scale.files import measure_batch, measure_checkpoint, measure_launch
from benchmarks.scale.meeting import measure_meeting
from benchmarks.scale.votes import measure_connecting, measure_processes, measure_votes

OWN_NETWORK = "CLOZE_OWN_NETWORK"
FIRST_PORT = 20400
MOST = {
    "launch": 2,
    "connecting_each_to_each": 64,  # in one process, which then has as many sockets as that number squared
    "connecting_when_they_speak": 64,
    "votes": 256,  # gloo has three threads for each rank
    "processes": 8,
}
"""How many ranks a part is measured with at most."""
BUSY = 4
"""programs that want a core each, beside rank 0"""


@dataclass(frozen=True)
class Ranks:
    """Measures what the parts of a run cost for several numbers of ranks."""

    shards: Path | None = None
    """Folder of shards, to measure what a rank does for a batch."""
    ranks: tuple[int, ...] = (2, 4, 8, 64, 256, 1024)
    """How many ranks there are, in turn."""
    sequences: int = 64
    """Sequences of each rank in a batch."""
    only: tuple[str, ...] = ()
    """Parts to measure, such as `beats`; the file keeps what it has of the others (default: all parts)."""
    out: Path = field(default_factory=partial(results_file, "ranks"))
    """File for what is found."""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Ranks, args=arguments, prog="ranks.py")
    console = Console(highlight=False, soft_wrap=True)
    before = read_results(settings.out) if settings.only and settings.out.exists() else {}
    own = {"own_network": OWN_NETWORK in os.environ}
    results = before | record("ranks", ["torch", "deepspeed", "safetensors"], own)
    for part, measure in parts(settings).items():
        if settings.only and part not in settings.only:
            continue
        results[part] = {}
        for ranks in settings.ranks:
            if ranks <= MOST.get(part, ranks):
                results[part][str(ranks)] = found = measure(ranks)
                console.print(f"{part}, {ranks} ranks: {found}")
    console.print(f"kept in {write_results(settings.out, results)}")
    return 0


def parts(settings: Ranks) -> dict[str, Callable[[int], Any]]:
    """What is measured, by name: each for a number of ranks."""
    port = iter(range(FIRST_PORT, FIRST_PORT + 1000)).__next__

    def checkpoint(ranks: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            return measure_checkpoint(Path(folder) / "checkpoint", ranks)

    found: dict[str, Callable[[int], Any]] = {
        "launch": lambda _: measure_launch(),
        "meeting": lambda ranks: measure_meeting(ranks, port()),
        "beats": lambda ranks: measure_beats(ranks, port()),
        "beats_beside_busy_programs": lambda ranks: measure_beats(ranks, port(), busy=BUSY),
        "connecting_each_to_each": lambda ranks: measure_connecting(ranks, lazy=False),
        "connecting_when_they_speak": lambda ranks: measure_connecting(ranks, lazy=True),
        "votes": lambda ranks: measure_votes(ranks, port()),
        "processes": lambda ranks: measure_processes(ranks, port()),
        "checkpoint": checkpoint,
    }
    if (shards := settings.shards) is not None:
        found["batch"] = lambda ranks: measure_batch(shards, ranks, settings.sequences)
    return found


def go_into_own_network() -> None:
    """Starts this program again in a network of its own, where this user may make one."""
    if OWN_NETWORK in os.environ or os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        return
    os.environ[OWN_NETWORK] = "yes"
    again = 'ip link set lo up && exec "$@"'
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", again, "sh", sys.executable, *sys.argv])


if __name__ == "__main__":
    with mistakes_told():
        go_into_own_network()
        torch.set_num_threads(1)
        sys.exit(main(sys.argv[1:]))
