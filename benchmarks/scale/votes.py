"""What it costs that all ranks agree after each step: connections between them, and messages one after another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scale.crowd import PROCESSES, crowd, open_sockets
from pretraining.processes.launchers import World
from pretraining.processes.voting import find_greatest

VOTES = 20


class CountedKeys(dist.Store):  # type: ignore[misc, name-defined]
    """A store in this process, with what gloo asks of it."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self.requests, self.bytes = store, 0, 0

    def set(self, key: str, value: Any) -> None:
        self._count(value)
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        value = self._store.get(key)
        self._count(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._count(b"")
        self._store.wait(keys, timeout or timedelta(seconds=60))

    def _count(self, value: bytes) -> None:
        self.requests, self.bytes = self.requests + 1, self.bytes + len(value)


def measure_connecting(ranks: int, lazy: bool) -> dict[str, float]:
    """What one group of gloo asks of the store and how many sockets each rank has, all ranks being threads of one
    process: before the ranks first vote, and after."""
    store, found = dist.HashStore(), {}  # type: ignore[attr-defined]
    stores = [CountedKeys(store) for _ in range(ranks)]
    groups: list[Any] = [None] * ranks

    def join(rank: int) -> None:
        groups[rank] = _gloo(stores[rank], rank, ranks, lazy)

    before, begin = open_sockets(), time.perf_counter()
    _all(ranks, join)
    found["seconds_to_connect"] = round(time.perf_counter() - begin, 2)
    found["sockets_of_a_rank"] = round((open_sockets() - before) / ranks, 1)
    _all(ranks, lambda rank: find_greatest(torch.zeros(2), groups[rank]))
    found["sockets_of_a_rank_after_a_vote"] = round((open_sockets() - before) / ranks, 1)
    found["requests_of_a_rank"] = max(store.requests for store in stores)
    found["bytes_of_a_rank"] = max(store.bytes for store in stores)
    return found


def _gloo(store: Any, rank: int, ranks: int, lazy: bool) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo", lazy_init=lazy)]
    options._timeout, options._threads = timedelta(seconds=120), 1
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def _all(ranks: int, act: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_votes(ranks: int, port: int) -> dict[str, float]:
    """A vote of so many ranks that are threads of a few processes, over real connections: the turns that it takes, and
    the sockets of a rank, two to the store among them. It tells nothing of time: all share these cores."""

    def vote(world: World) -> tuple[bool, float, int]:
        store = dist.TCPStore("127.0.0.1", port, is_master=world.rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
        group = _gloo(store, world.rank, world.size, lazy=True)
        begin = time.monotonic()
        greatest = find_greatest(torch.tensor([float(world.rank)]), group)
        seconds = time.monotonic() - begin
        store.add("done", 1)
        while store.add("done", 0) < world.size:
            time.sleep(0.5)
        sockets = open_sockets()
        time.sleep(1.0 if world.rank else 3.0)  # the store ends with rank 0
        return float(greatest) == world.size - 1, seconds, sockets

    done = crowd(ranks, vote, port)
    assert all(right for right, _, _ in done), "a vote was lost"
    sockets = sum(max(found for _, _, found in done[first::PROCESSES]) for first in range(1, min(ranks, PROCESSES + 1)))
    return {"turns": (ranks - 1).bit_length(), "sockets_of_a_rank": round(sockets / (ranks - 1), 1)}


def measure_processes(ranks: int, port: int) -> dict[str, float]:
    """A vote, gloo's own all-reduce and a gather among so many processes, in seconds; no other program has their cores
    meanwhile, where this user may have that."""
    pipes = [_start(rank, ranks, port) for rank in range(ranks)]
    results = []
    for pid, pipe in pipes:
        with os.fdopen(pipe) as stream:
            results.append([float(word) for word in stream.read().split()])
        os.waitpid(pid, 0)
    names = ("vote", "gloo_all_reduce", "gather", "sockets_of_a_rank")
    return {name: round(max(column), 5) for name, column in zip(names, zip(*results, strict=True), strict=True)}


def _start(rank: int, ranks: int, port: int) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(20))
    try:
        with os.fdopen(writing, "w") as stream:
            stream.write(" ".join(map(str, _time_together(World(rank, ranks, rank, ranks, port=port)))))
        code = 0
    finally:
        os._exit(code)


def _time_together(world: World) -> list[float]:
    """The seconds of a vote, of an all-reduce and of a gather; and the sockets that this rank has open then."""
    from pretraining.processes.group import connect, disconnect, gather

    connect(world, torch.device("cpu"), timeout=120)
    vote = torch.zeros(2, dtype=torch.float64)
    ways: list[Callable[[], object]] = [
        lambda: find_greatest(vote),
        lambda: dist.all_reduce(vote, dist.ReduceOp.MAX),
        lambda: gather("sixty-four characters are what a digest of SHA-256 has in letters"),
    ]
    found = []
    for way in ways:
        way()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(VOTES):
            way()
        found.append((time.perf_counter() - begin) / VOTES)
    sockets = open_sockets()
    dist.barrier()
    disconnect()
    return [*found, sockets]
