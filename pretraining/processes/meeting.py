"""How the ranks of a run find one another at the start: in a store at rank 0, to which each of them comes.

Rank 0 alone asks after every rank. All others ask for one answer, so that the requests to the store grow with the
number of ranks, and not with its square. Ranks of several machines then choose the network over which they speak: that
by which they reach rank 0. Gloo would ask for the address of the machine's own name, which often means 127.0.1.1, or
lies in another network.
"""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from data_prep.common.errors import SharedError, UnreachedError, UserError, name_ranks
from data_prep.common.launchers import LOOPBACK, World
from pretraining.processes.ahead import await_call
from pretraining.processes.signing import LOOK_SECONDS, LOOKS_A_SECOND, SECRET, SignedStore, read_secret, write_secret

ANSWER_SECONDS, ANSWER_SECONDS_OF_A_RANK = 15.0, 0.1
"""A store answers at once: what needs longer is another program. But where all ranks come at once, each waits for those
before it, of whose addresses torch's store asks the names, one after another."""
FILE_SECONDS = 60.0
"""For how long a network file system may not show a file that another machine has just written."""
CONNECTIONS = 2
"""Connections of each rank to the store: one serves one thread at a time."""
OWN_FILES = 256
"""More files than a rank has open besides: libraries, shards, logs, its connections to other ranks."""
CHOICE = "GLOO_SOCKET_IFNAME"
"""The variable in which users say over which interface gloo speaks."""


def meet(world: World, patience: float, folder: Path) -> SignedStore:
    """The store of this run, once every rank has come to it; while they come, their secret may lie in the folder."""
    if world.size == 1:
        return SignedStore(dist.HashStore(), b"")  # type: ignore[attr-defined]  # no network
    place = socket.gethostname() if world.one_machine else world.address  # other machines may share the folder
    path, made = folder / f".secret-{place}-{world.port}", world.rank == 0 and not folder.exists()
    store = _enter_store(world, patience, path)
    try:
        _wait_for_all(store, world, patience)
    finally:
        if world.rank == 0 and not os.environ.get(SECRET):
            with suppress(OSError):
                path.unlink()
                if made:
                    folder.rmdir()
    return store


def _enter_store(world: World, patience: float, path: Path) -> SignedStore:
    """The store of this run, which this rank has entered; UserError where another program answers for it."""
    hosts = world.rank == 0 and not uses_agent_store()
    _require_open_files(world)
    if not hosts:
        _wait_for_listener(world, patience)
    try:
        store = _join(_open_store(world, hosts), world, patience, path)
    except (dist.DistError, OSError, LateError) as error:  # LateError is no OSError in Python 3.10
        if hosts and "in use" not in str(error).lower():
            raise UserError(
                f"rank 0 cannot listen at {world.address}:{world.port}: {error}\nis MASTER_ADDR the host of rank 0?"
            ) from error
        store = None
    if store is None and world.rank > 0 and not world.one_machine and not read_secret(path):
        cure = f"give all ranks the same --out in shared storage, or the same secret, in {SECRET}"
        raise UnreachedError(f"rank {world.rank} reaches rank 0, but not its file {path}\n{cure}")
    if store is None:
        raise UserError(
            f"port {world.port} of {world.address} is in use by another program or run\n"
            "choose a free one: MASTER_PORT=<port> before the command (torchrun and deepspeed: --master-port <port>)"
        )
    return store


def _require_open_files(world: World) -> None:
    """Lets this process have as many connections as ranks will open; refuses to begin where the one with the store may
    not."""
    needed, limits = CONNECTIONS * world.size + OWN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    before, most = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    now = max(before, min(needed, most))
    if now > before:  # many systems give 1,024 to begin with, and more to whoever asks
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, limits[1]))
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
            return socket.create_connection((_address(world), world.port), _answer_seconds(world)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnreachedError(
                    f"rank {world.rank} did not reach rank 0 at {world.address}:{world.port} in {patience:.0f} s: "
                    f"{error}\nwas rank 0 started, is MASTER_ADDR its host, and does no firewall close the port?"
                ) from error
        time.sleep(0.1)


def _address(world: World) -> str:
    """Where ranks reach the store: on one machine where no other can, unless torchrun has opened it."""
    return LOOPBACK if world.one_machine and not uses_agent_store() else world.address


def _open_store(world: World, hosts: bool) -> Any:
    """The TCPStore at rank 0's address, opened in a thread: a silent program there would keep torch for ever."""
    seconds, address = _answer_seconds(world), _address(world)
    how: dict[str, Any] = {"is_master": hosts, "wait_for_workers": False, "timeout": timedelta(seconds=seconds)}
    if hosts and address == LOOPBACK:  # torch would listen on all interfaces
        how["master_listen_fd"] = socket.create_server((address, world.port)).detach()
    return await_call(seconds, lambda: dist.TCPStore(address, world.port, **how))  # type: ignore[attr-defined]


def _join(raw: Any, world: World, patience: float, path: Path) -> SignedStore | None:
    """The store in which this rank signs; None where it is of another run: its ranks have another secret, or this rank
    has joined it before."""
    store = _find_secret(raw, world, patience, path) if world.rank else _publish_nonce(raw, world, path)
    own = secrets.token_hex(8)
    if store is None or store.get("ranks") != str(world.size) or store.claim(f"joined/{world.rank}", own) != own:
        return None
    return store


def _publish_nonce(raw: Any, world: World, path: Path) -> SignedStore:
    """Publishes a nonce and returns the store in which rank 0 signs with the secret and the nonce, so that ranks ignore
    messages of an earlier start with the same secret."""
    if not os.environ.get(SECRET):
        write_secret(path)
    secret, nonce = read_secret(path), secrets.token_hex(16)
    store = SignedStore(raw, secret + nonce.encode())
    store.set("ranks", str(world.size))
    SignedStore(raw, secret).set("nonce", nonce)
    return store


def _find_secret(raw: Any, world: World, patience: float, path: Path) -> SignedStore | None:
    """Waits until rank 0 has signed a nonce with the secret that this rank reads, and returns the store. Until rank 0
    comes, the file may have an older secret. None if there is no such nonce in time."""
    seconds = _answer_seconds(world) + (0 if world.one_machine or os.environ.get(SECRET) else FILE_SECONDS)
    deadline = time.monotonic() + (patience if uses_agent_store() else seconds)
    while time.monotonic() <= deadline:
        secret = read_secret(path)
        if secret and (nonce := SignedStore(raw, secret).get("nonce")) is not None:
            return SignedStore(raw, secret + nonce.encode())
        raw.check(["nonce"])  # an error where rank 0 is gone, also before this rank has read any secret
        time.sleep(_pause(world))
    return None


def _answer_seconds(world: World) -> float:
    """How long a rank waits for an answer of the store while all others ask it too."""
    return ANSWER_SECONDS + ANSWER_SECONDS_OF_A_RANK * world.size


def _pause(world: World) -> float:
    """How long a rank waits from one look into the store to the next, while all others look too."""
    return max(LOOK_SECONDS, world.size / LOOKS_A_SECOND)


def _wait_for_all(store: SignedStore, world: World, patience: float) -> None:
    """Waits until every rank has joined; rank 0 names those that have not."""
    if world.rank > 0:
        if store.find("complete", patience + _answer_seconds(world), _pause(world)) != "yes":
            _leave(store, world)
            raise UserError(f"rank 0 at {world.address}:{world.port} gave up waiting for all ranks")
        return
    end = time.monotonic() + patience
    missing = [rank for rank in range(world.size) if not store.find(f"joined/{rank}", end - time.monotonic())]
    store.set("complete", "no" if missing else "yes")
    if missing:
        _leave(store, world, missing)
        raise UserError(
            f"{name_ranks(missing)} of {world.size} did not come in {patience:.0f} s\n"
            f"were all started ({world.launcher}), and can their hosts reach {world.address}:{world.port}?"
        )


def _leave(store: SignedStore, world: World, missing: Sequence[int] = ()) -> None:
    """Returns when this rank may end. The store ends with rank 0, which waits until the others have read why."""
    if not uses_agent_store():
        store.leave("left", world.rank, {*range(world.size)} - {*missing})


def ask_rank_0(
    store: SignedStore, world: World, topic: str, own: str, answer_all: Callable[[Sequence[str]], str], patience: float
) -> str:
    """Returns what rank 0 answers to all ranks once each has said its own word on a topic; a UserError of its function
    is raised on all. All ranks call it."""
    store.set(f"{topic}/{world.rank}", own)
    if world.rank == 0:
        try:
            told = {"answer": answer_all(store.await_all([f"{topic}/{rank}" for rank in range(world.size)], patience))}
        except UserError as error:
            told = {"fault": str(error)}
        store.set(f"{topic}/answer", json.dumps(told))
    told = json.loads(store.await_all([f"{topic}/answer"], patience)[0])
    if "fault" in told:
        _leave(store, world)
        raise SharedError(told["fault"])
    return str(told["answer"])


class Route(NamedTuple):
    """The way of a rank to rank 0."""

    chosen: bool
    """whether this rank needs none, because its user has named an interface"""
    here: str = ""
    """this rank's address on the way; empty where there is no way"""
    there: str = ""
    """rank 0's address on the way"""
    error: str = ""
    """why there is no way"""


def find_interface(store: SignedStore, world: World, patience: float) -> str | None:
    """The network interface of this machine that leads to the other ranks, such as `eth0`; None where users have named
    one, and where no interface has the address that was found. All ranks call it.

    Say that rank 1 has the address 10.0.0.2, and reaches rank 0 at 10.0.0.1. Rank 1 then takes the interface with
    10.0.0.2. Rank 0 reaches itself at 127.0.1.1, which leads to nobody else; so it hears from rank 1 that it is
    10.0.0.1 to others, and takes the interface with that.
    """
    route = _route(world)
    address_of_0 = ask_rank_0(store, world, "address", json.dumps(route), partial(_find_address, world), patience)
    if route.chosen:
        return None
    own = address_of_0 or route.here if _is_loopback(route.here) else route.here
    return next((name for name, addresses in _interfaces().items() if own in addresses), None)


def _find_address(world: World, words: Sequence[str]) -> str:
    """Finds rank 0's address as others see it among the routes of all ranks; it may be empty. UserError where a rank
    that needs a way has none."""
    routes = [Route(*json.loads(word)) for word in words]
    for rank, route in enumerate(routes):
        if not (route.here or route.chosen):
            raise UserError(
                f"rank {rank} finds no way to MASTER_ADDR, {world.address}: {route.error}\n"
                f"give rank 0's address in numbers as MASTER_ADDR, or name each machine's interface: "
                f"{CHOICE}=<interface>"
            )
    return next((route.there for route in routes if route.here and not _is_loopback(route.here)), "")


def _route(world: World) -> Route:
    """The way of this rank to rank 0, by the first of its addresses to which there is one. Nothing is sent."""
    chosen, error = CHOICE in os.environ, ""
    try:
        for kind, _, _, _, address in socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(kind, socket.SOCK_DGRAM) as way:
                    way.connect(address)
                    return Route(chosen, way.getsockname()[0], way.getpeername()[0])
            except OSError as unreachable:
                error = str(unreachable)
    except OSError as unknown:
        error = str(unknown)
    return Route(chosen, error=error)


def _interfaces() -> dict[str, set[str]]:
    """The addresses of every network interface of this machine."""
    return {
        name: {entry.address.partition("%")[0] for entry in entries} for name, entries in psutil.net_if_addrs().items()
    }


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
