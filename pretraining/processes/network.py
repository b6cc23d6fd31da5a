"""Over which network the ranks of several machines speak: that by which they reach rank 0.

Gloo would ask for the address of the machine's own name, which often means 127.0.1.1, or lies in another network.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from datetime import timedelta
from typing import Any

import psutil

from pretraining.processes.launchers import World


def find_interface(store: Any, world: World, patience: float) -> str | None:
    """The network interface of this machine by which it reaches rank 0, or others do; None where none has the address.

    All ranks call it. To the machine of rank 0 its own name may mean nothing, so the others say what it means to them.
    """
    store.set(f"cloze/address/{world.rank}", json.dumps(_route(world)))
    keys = [f"cloze/address/{rank}" for rank in range(world.size)]
    store.wait(keys, timedelta(seconds=patience))
    routes = [json.loads(route) for route in store.multi_get(keys)]
    own, _ = routes[world.rank]
    if _is_loopback(own):
        own = next((there for here, there in routes if not _is_loopback(here)), own)
    return next((name for name, addresses in _interfaces().items() if own in addresses), None)


def _route(world: World) -> tuple[str, str]:
    """The addresses of this rank and of rank 0 on the way between them. Nothing is sent."""
    kind, _, _, _, address = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect(address)
        return way.getsockname()[0], way.getpeername()[0]


def _interfaces() -> dict[str, set[str]]:
    """The addresses of every network interface of this machine."""
    return {
        name: {entry.address.partition("%")[0] for entry in entries} for name, entries in psutil.net_if_addrs().items()
    }


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
