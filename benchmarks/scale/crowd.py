"""Many ranks on a machine of few cores: threads of a few processes, each of which does what a rank does.

Rank 0 has a process of its own, so that what a store with many clients costs can be told from what the clients cost.
"""

from __future__ import annotations

import os
import pickle
import resource
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from pretraining.processes.environment import allow_open_files
from pretraining.processes.launchers import World

PROCESSES = 4
"""that the ranks besides rank 0 are shared among"""
FILES = 16384
STACK = 1 << 19
LOCAL = 8
"""ranks of a machine, as they are told"""


def crowd(ranks: int, act: Callable[[World], Any], port: int) -> list[Any]:
    """Lets so many ranks do something together; what it gave each of them, in their order."""
    groups = [range(1)] + [range(1 + first, ranks, PROCESSES) for first in range(PROCESSES)]
    pipes = [_fork(group, ranks, act, port) for group in groups if len(group)]
    done: dict[int, Any] = {}
    for pid, pipe in pipes:
        with os.fdopen(pipe, "rb") as stream:
            done |= pickle.loads(stream.read() or pickle.dumps({}))
        os.waitpid(pid, 0)
    if len(done) < ranks:
        raise RuntimeError(f"only {len(done)} of {ranks} ranks came to the end")
    return [done[rank] for rank in range(ranks)]


def _fork(group: Sequence[int], ranks: int, act: Callable[[World], Any], port: int) -> tuple[int, int]:
    """Starts a process with some of the ranks; its id, and where it will say what became of them."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        found = _act_together(group, ranks, act, port)
        with os.fdopen(writing, "wb") as stream:
            stream.write(pickle.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _act_together(group: Sequence[int], ranks: int, act: Callable[[World], Any], port: int) -> dict[int, Any]:
    allow_open_files(FILES)
    threading.stack_size(STACK)
    found: dict[int, Any] = {}

    def act_as(rank: int) -> None:
        with suppress(dist.DistError):  # it is missed by whoever waits for all
            found[rank] = act(World(rank, ranks, rank % LOCAL, min(LOCAL, ranks), port=port, launcher="a simulation"))

    threads = [threading.Thread(target=act_as, args=(rank,)) for rank in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def processor_seconds() -> float:
    """Seconds of a processor that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def open_sockets() -> int:
    """How many sockets this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them is gone
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


class CountingStore:
    """A rank's connection to a store that counts what it asks, and the bytes of keys and values that this moves."""

    def __init__(self, store: Any, counts: Counter[str] | None = None) -> None:
        self._store, self.counts = store, Counter[str]() if counts is None else counts

    def clone(self) -> CountingStore:
        return CountingStore(self._store.clone(), self.counts)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            answer = function(*arguments)
            self.counts["requests"] += 1
            self.counts["bytes"] += sum(map(_size, arguments)) + _size(answer)
            return answer

        return counted


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8 if isinstance(value, int) else 0


def wait_until(moment: float) -> None:
    """Waits for a moment of the clock that all processes of a machine share."""
    time.sleep(max(0.0, moment - time.monotonic()))
