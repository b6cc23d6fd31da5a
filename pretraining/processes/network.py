"""Chooses the network over which the ranks of several machines speak: that by which they reach rank 0.

Gloo would ask for the address of the machine's own name, which often means 127.0.1.1, or lies in another network.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import psutil

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.processes.meeting import ask_rank_0
from pretraining.processes.signing import SignedStore

CHOICE = "GLOO_SOCKET_IFNAME"
"""The variable in which users say over which interface gloo speaks."""


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
    address_of_0 = ask_rank_0(store, world, "address", json.dumps(route), partial(_answer, world), patience)
    if route.chosen:
        return None
    own = address_of_0 or route.here if _is_loopback(route.here) else route.here
    return next((name for name, addresses in _interfaces().items() if own in addresses), None)


def _answer(world: World, words: Sequence[str]) -> str:
    """Rank 0's conclusion from the routes of all ranks: its address as others see it, which may be empty; UserError
    where a rank that needs a way has none."""
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
