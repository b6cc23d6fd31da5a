"""What the start of a run costs: every rank comes to rank 0's store, and tells its address and its GPU."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.scale.crowd import CountingStore, crowd, processor_seconds
from pretraining.processes import group, meeting, network
from pretraining.processes.launchers import World

PATIENCE = 300.0


def come(world: World) -> dict[str, Any]:
    """One rank's start, as `connect` makes it until torch takes over."""
    begin, used = time.monotonic(), processor_seconds()
    store = meeting.meet(world, PATIENCE)
    met = time.monotonic()
    network.find_interface(store, world, PATIENCE)
    group._check_own_gpus(store, world, torch.device("cuda", 0), PATIENCE)
    watch_store = store.clone()
    end = time.monotonic()
    time.sleep(1.0 if world.rank else 3.0)  # the store ends with rank 0
    return {
        "begin": begin,
        "met": met,
        "end": end,
        "processor": processor_seconds() - used,
        "kept": watch_store,
        **store.counts,
    }


def measure_meeting(ranks: int, port: int) -> dict[str, float]:
    """Seconds of all ranks, of rank 0's processor, and what they asked of the store."""
    gpus = itertools.count()

    def pretend_gpu(_: object) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"{os.getpid()} {next(gpus)}")

    def act(world: World) -> dict[str, Any]:
        return {key: value for key, value in come(world).items() if key != "kept"}

    open_store = meeting._open_store
    counted = patch.object(meeting, "_open_store", lambda *arguments: CountingStore(open_store(*arguments)))
    with counted, patch.object(torch.cuda, "get_device_properties", pretend_gpu):
        done = crowd(ranks, act, port)
    begin = min(rank["begin"] for rank in done)
    return {
        "seconds_to_meet": round(max(rank["met"] for rank in done) - begin, 2),
        "seconds": round(max(rank["end"] for rank in done) - begin, 2),
        "processor_of_rank_0": round(done[0]["processor"], 2),
        "requests": sum(rank["requests"] for rank in done),
        "requests_of_a_rank": max(rank["requests"] for rank in done[1:]),
        "bytes": sum(rank["bytes"] for rank in done),
    }
