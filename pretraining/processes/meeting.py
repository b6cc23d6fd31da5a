"""How the ranks of a run find one another at the start: in a store at rank 0, to which each of them comes.

Rank 0 alone asks after every rank. All others ask for one answer, so that the requests to the store grow with the
number of ranks, and not with its square.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.processes.environment import allow_open_files
from pretraining.processes.errors import SharedError, UnreachedError, name_ranks

ANSWER_SECONDS, ANSWER_SECONDS_OF_A_RANK = 15.0, 0.1
"""A store answers at once: what needs longer is another program. But where all ranks come at once, each waits for those
before it, of whose addresses torch's store asks the names, one after another."""
LOOK_SECONDS, LOOKS_A_SECOND = 0.05, 1000
"""The pause between two looks into the store, and how often all ranks together look at most."""
CONNECTIONS = 2
"""Connections of each rank to the store: one serves one thread at a time."""
OWN_FILES = 256
"""More files than a rank has open besides: libraries, shards, logs, its connections to other ranks."""


def meet(world: World, patience: float) -> Any:
    """The store of this run, once every rank has come to it."""
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # no network
    hosts = world.rank == 0 and not uses_agent_store()
    _require_open_files(world)
    if not hosts:
        _wait_for_listener(world, patience)
    try:
        store = _open_store(world, hosts)
        joined = _join(store, world, patience)
    except (dist.DistError, OSError, LateError) as error:  # LateError is no OSError in Python 3.10
        if hosts and "in use" not in str(error).lower():
            raise UserError(
                f"rank 0 cannot listen at {world.address}:{world.port}: {error}\nis MASTER_ADDR the host of rank 0?"
            ) from error
        joined = False
    if not joined:
        raise UserError(
            f"port {world.port} of {world.address} is in use by another program or run\n"
            "choose a free one: MASTER_PORT=<port> before the command (torchrun and deepspeed: --master-port <port>)"
        )
    _wait_for_all(store, world, patience)
    return store


def _require_open_files(world: World) -> None:
    """Refuses to begin where the process with the store may not have as many connections as ranks will open."""
    needed = CONNECTIONS * world.size + OWN_FILES
    before, now = allow_open_files(needed)
    who, allowed = ("torchrun", before) if uses_agent_store() else ("rank 0", now)
    if world.rank == 0 and allowed < needed:
        raise UserError(
            f"{who} may have {allowed:,} files and connections open, and {world.size:,} ranks need {needed:,}\n"
            f"raise the limit before the command: ulimit -n {needed}"
        )


def uses_agent_store() -> bool:
    """Whether the store belongs to torchrun's agent, which outlives rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_for_listener(world: World, patience: float) -> None:
    """Waits until something listens where rank 0 should, which may start later than this rank.

    TCPStore could try again by itself, but where rank 0 does not come it prints pages of C++ frames and waits twice as
    long as it is told, and where another program keeps silent it waits for ever.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((world.address, world.port), timeout=_answer_seconds(world)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnreachedError(
                    f"rank {world.rank} did not reach rank 0 at {world.address}:{world.port} in {patience:.0f} s: "
                    f"{error}\nwas rank 0 started, is MASTER_ADDR its host, and does no firewall close the port?"
                ) from error
        time.sleep(0.1)


def _open_store(world: World, hosts: bool) -> Any:
    """The TCPStore at rank 0's address, opened in a thread: a silent program there would keep torch for ever."""
    opened: Future[Any] = Future()
    seconds = _answer_seconds(world)

    def open_it() -> None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                world.address, world.port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=seconds)
            )
            opened.set_result(store)
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=open_it, daemon=True).start()
    return opened.result(seconds)


def _join(store: Any, world: World, patience: float) -> bool:
    """Whether the store is that of this run, which it is not if this rank has joined it before, or other ranks have."""
    if world.rank == 0:
        store.set("cloze/ranks", str(world.size))
    elif not _has(store, "cloze/ranks", patience if uses_agent_store() else _answer_seconds(world), _pause(world)):
        return False
    return int(store.get("cloze/ranks")) == world.size and bool(store.add(f"cloze/joined/{world.rank}", 1) == 1)


def _answer_seconds(world: World) -> float:
    """How long a rank waits for an answer of the store while all others ask it too."""
    return ANSWER_SECONDS + ANSWER_SECONDS_OF_A_RANK * world.size


def _pause(world: World) -> float:
    """How long a rank waits from one look into the store to the next, while all others look too."""
    return max(LOOK_SECONDS, world.size / LOOKS_A_SECOND)


def _wait_for_all(store: Any, world: World, patience: float) -> None:
    """Waits until every rank has joined; rank 0 names those that have not."""
    if world.rank > 0:
        told = _has(store, "cloze/complete", patience + _answer_seconds(world), _pause(world))
        if not told or store.get("cloze/complete") != b"yes":
            raise UserError(f"rank 0 at {world.address}:{world.port} gave up waiting for all ranks")
        return
    end = time.monotonic() + patience
    missing = [rank for rank in range(world.size) if not _has(store, f"cloze/joined/{rank}", end - time.monotonic())]
    store.set("cloze/complete", "no" if missing else "yes")
    if missing:
        time.sleep(1 + _pause(world))  # the store ends with this rank, and the others are still to read it
        raise UserError(
            f"{name_ranks(missing)} of {world.size} did not come in {patience:.0f} s\n"
            f"were all started ({world.launcher}), and can their hosts reach {world.address}:{world.port}?"
        )


def _has(store: Any, key: str, seconds: float, pause: float = LOOK_SECONDS) -> bool:
    """Whether the key is there, or comes within so many seconds. (`store.wait` would print a warning of its own.)"""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def ask_rank_0(
    store: Any, world: World, topic: str, own: str, conclude: Callable[[Sequence[str]], str], patience: float
) -> str:
    """Rank 0's conclusion from what every rank says of a topic; where it concludes with a UserError, all raise it.
    All ranks call it, each with its own word."""
    store.set(f"cloze/{topic}/{world.rank}", own)
    answer, limit = f"cloze/{topic}/answer", timedelta(seconds=patience)
    if world.rank == 0:
        keys = [f"cloze/{topic}/{rank}" for rank in range(world.size)]
        store.wait(keys, limit)
        try:
            told = {"answer": conclude([word.decode() for word in store.multi_get(keys)])}
        except UserError as error:
            told = {"fault": str(error)}
        store.set(answer, json.dumps(told))
    store.wait([answer], limit)
    told = json.loads(store.get(answer))
    if "fault" in told:
        if world.rank == 0:
            time.sleep(1)  # the store ends with this rank, and the others are still to read it
        raise SharedError(told["fault"])
    return str(told["answer"])
