"""What the watch over all ranks costs rank 0, which keeps the store and hears everybody's beats."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

from benchmarks.scale.crowd import CountingStore, crowd, processor_seconds, wait_until
from pretraining.processes import meeting, watchdog
from pretraining.processes.launchers import World
from pretraining.processes.watchdog import Watch

SETTLE = 4.0
"""seconds until all watches are at work"""


class _Stores(threading.local):
    """The two connections of the rank that a thread pretends to be."""

    pair: tuple[Any, Any]


def measure_beats(ranks: int, port: int, seconds: float = 10.0, busy: int = 0) -> dict[str, float]:
    """The load on rank 0 while all ranks beat, and the longest for which it heard nothing of one; with so many programs
    besides that want a core each."""
    stores = _Stores()

    def watch_for_a_while(world: World) -> dict[str, float]:
        counts = Counter[str]()
        store = CountingStore(meeting.meet(world, 300.0), counts)
        stores.pair = store, store.clone()
        watch = Watch(world)
        watch.__enter__()
        start = float(store.get("start")) if world.rank else _say_start(store)
        wait_until(start)
        before, used, longest = Counter(counts), processor_seconds(), 0.0
        while time.monotonic() < start + seconds:
            time.sleep(0.2)
            watch.mark()
            longest = max([longest, *list(watch._judge._quiet.values())])
        moved, used = counts - before, processor_seconds() - used
        if world.rank == 0:
            time.sleep(3.0)  # the store ends with this rank
        watch._stopped.set()
        return {"used": used, "quiet": longest, "requests": moved["requests"], "bytes": moved["bytes"]}

    others = [multiprocessing.get_context("fork").Process(target=_burn, daemon=True) for _ in range(busy)]
    for other in others:
        other.start()
    try:
        with patch.object(watchdog, "open_stores", lambda: stores.pair):
            done = crowd(ranks, watch_for_a_while, port)
    finally:
        for other in others:
            other.kill()
    return {
        "share_of_a_core_of_rank_0": round(done[0]["used"] / seconds, 4),
        "requests_a_second": round(sum(rank["requests"] for rank in done) / seconds),
        "bytes_a_second": round(sum(rank["bytes"] for rank in done) / seconds),
        "longest_silence": round(done[0]["quiet"], 1),
    }


def _say_start(store: Any) -> float:
    start = time.monotonic() + SETTLE
    store.set("start", str(start))
    return start


def _burn() -> None:
    while True:
        pass
