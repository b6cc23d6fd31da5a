"""How many workers a machine has room for, by its cores and its memory."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

NEED = 320 * 10**6
"""Bytes of its own that a worker needs at most: 211 MB were measured (RssAnon; 189 MB as USS) at the peak of a worker
of two, on 97 MB of Wikipedia with the settings that shard.py has by itself (lengths of 128 and 512, 5 duplicates), and
half as much again is for corpora that fill tasks and shards better."""
MAIN_NEED = 600 * 10**6
"""Bytes that the main process needs besides: 511 MB were measured there, for the training of the vocabulary."""
LEAST = 10**9
"""Bytes that a process may have in any case, where it limits itself."""
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),  # version 2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The files of a group of processes with its limit and what it uses, and what of that is a cache that gives way."""


def list_cores() -> list[int]:
    """Lists the cores that this process may run on, by its affinity, which Slurm sets."""
    return sorted(os.sched_getaffinity(0))


def num_cores() -> int:
    """Counts the cores that this process may use, also by its quota in a container."""
    cores = len(list_cores())
    with suppress(OSError, ValueError):  # no such file, or no quota
        quota, period = (CGROUPS / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    return cores


def room_for_workers() -> int:
    """Says how many workers there are unless a user says so: one for each core, or as many as memory has room for."""
    cores, available = num_cores(), available_memory()
    return cores if available is None else min(cores, max(1, (available - MAIN_NEED) // NEED))


def available_memory(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> int | None:
    """Says how many bytes programs can still take, of the machine and of what its groups of processes may have.

    Returns None where the system does not say it.
    """
    machine = [1024 * value for name, value in _numbers(proc / "meminfo") if name == "MemAvailable:"]  # swap left out
    groups = (left for folder in _list_groups(proc, cgroups) for left in _of_group(folder))
    return min([*machine, *groups], default=None)


def read_memory_limits(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> Iterator[int]:
    """Reads the limits in bytes of the groups of processes that this process is in, as containers and jobs are."""
    for folder, (limit, _, _) in itertools.product(_list_groups(proc, cgroups), CGROUP_FILES):
        with suppress(OSError, ValueError):  # none of this version, or no limit
            yield int((folder / limit).read_text())


def limit_memory() -> None:
    """Lets this process have no more memory than there is, so that a file that claims to be huge is an error to it."""
    with suppress(OSError, ValueError):
        available, (_, hard) = available_memory(), resource.getrlimit(resource.RLIMIT_DATA)
        if available is not None:
            most = max(available * 9 // 10, LEAST)
            soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _list_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Lists the folders of the groups of this process, and of those that they are in: each has a limit of its own.

    In a container the folder of the innermost group is often the only one that is there, under the name of the root.
    """
    with suppress(OSError):
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        for controllers, name in [(line[1], line[2].strip("/")) for line in lines if len(line) == 3]:
            if controllers and "memory" not in controllers.split(","):
                continue
            root = cgroups / "memory" if controllers else cgroups
            for folder in (root / name, *(root / name).parents):
                if folder != root and root not in folder.parents:
                    break
                yield folder


def _of_group(folder: Path) -> Iterator[int]:
    """Reads what one group has left."""
    for limit, used, cache in CGROUP_FILES:
        try:
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
        except (OSError, ValueError):  # none of this version, or no limit
            continue
        freed = dict(_numbers(folder / "memory.stat")).get(cache, 0)
        yield max(0, most - max(0, taken - freed))


def _numbers(file: Path) -> Iterator[tuple[str, int]]:
    """Reads a file of lines with a name and a number each."""
    with suppress(OSError):
        for line in file.read_text().splitlines():
            name, *values = line.split()
            if values and values[0].isdigit():
                yield name, int(values[0])
