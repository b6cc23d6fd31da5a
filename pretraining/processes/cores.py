"""The cores of a rank: those next to its GPU, so that data between them takes no detour, and who else works on them.

Linux counts how long runnable threads wait for a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from data_prep.common.capacity import list_cores
from pretraining.processes.environment import SPINS_ALONE, SPINS_AMONG_OTHERS

DEVICES = Path("/sys/bus/pci/devices")
TASKS = Path("/proc/self/task")
"""Where Linux has a folder for each thread of this process. The second number of its `schedstat` is the nanoseconds for
which it could have worked, and had no core."""
STRETCH = 30.0
"""Seconds that are judged together. Shorter ones are full of what ends by itself, such as saving."""
MUCH = 0.3
"""Seconds of waiting in a second from which there is a word. Two threads alone on two cores wait for 0.03; beside one
program that keeps a core busy, for about 0.5."""


def keep_near(device: torch.device, threads: int) -> None:
    """Keeps this process on those of its cores that are next to its GPU, if they are enough for its threads. Where a
    launcher has given it others, or the system does not say which are near, all stays as it is."""
    gpu: Any = torch.cuda.get_device_properties(device)
    with suppress(AttributeError, OSError, ValueError):
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        near = read_cores((DEVICES / address / "local_cpulist").read_text())
        if len(own := near.intersection(list_cores())) >= threads:
            os.sched_setaffinity(0, own)


def read_cores(text: str) -> set[int]:
    """The numbers in a list of cores as Linux writes it, such as 0-3,8."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}


class CoreWatch:
    """Watches how long the threads of this process wait for cores, and says it once where that is long."""

    def __init__(
        self, tasks: Path = TASKS, clock: Callable[[], float] = time.monotonic, stretch: float | None = None
    ) -> None:
        """`stretch`: seconds that `word` needs at least since its last call, by default STRETCH."""
        self._tasks, self._clock, self._told = tasks, clock, False
        self._stretch = STRETCH if stretch is None else stretch
        self._began, self._before = clock(), self._waits()

    def word(self) -> str | None:
        """Returns a warning, once, where threads waited for much of the last stretch; None otherwise."""
        seconds = self._clock() - self._began
        if self._told or seconds < self._stretch:
            return None
        now = self._waits()
        waited = sum(wait - self._before.get(thread, 0) for thread, wait in now.items()) / 1e9 / seconds
        self._began, self._before = self._clock(), now
        if waited < MUCH:
            return None
        self._told = True
        cure = f"; begun with GOMP_SPINCOUNT={SPINS_AMONG_OTHERS} in the environment, it leaves cores to others sooner"
        return (
            f"this process waits for cores, its threads together {waited:.1f} s in each second: another program is at "
            "work on them, or there are more threads than cores. Steps take longer; their numbers are the same"
        ) + cure * (os.environ.get("GOMP_SPINCOUNT") == SPINS_ALONE)

    def _waits(self) -> dict[str, int]:
        """The nanoseconds for which each thread has waited so far; none where Linux does not count them."""
        waits = {}
        with suppress(OSError):
            for task in self._tasks.iterdir():
                with suppress(OSError, ValueError, IndexError):  # it has just ended
                    waits[task.name] = int((task / "schedstat").read_text().split()[1])
        return waits
