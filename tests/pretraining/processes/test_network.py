"""Over which network ranks of several machines speak. Two machines that do so: tests/end_to_end/test_nodes.py."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import torch.distributed as dist
from support.processes import spawn
from support.ranks import expect_end, take_part

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.processes import meeting
from pretraining.processes.ending import Code
from pretraining.processes.meeting import Route, find_interface
from pretraining.processes.signing import SignedStore

FIRST = World(0, 2, 0, 1, address="node0", port=29500)
UNREACHABLE = ("255.255.255.255", 29500)
"""to which Linux refuses to connect: it means all machines"""


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(meeting, "_interfaces", lambda: {"lo": {"127.0.0.1"}, "eth0": {"10.0.0.1"}})


def let_names_mean(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    answers = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)


def store_with(rank: int, route: Route) -> Any:
    """A store in which the other rank has said its way."""
    store = SignedStore(dist.HashStore(), b"secret")  # type: ignore[attr-defined]
    store.set(f"address/{rank}", json.dumps(route))
    return store


OTHER = Route(False, "10.0.0.2", "10.0.0.1")


def test_rank_0_hears_what_it_is_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    let_names_mean(monkeypatch, ("127.0.0.1", 29500))
    assert find_interface(store_with(1, OTHER), FIRST, 1) == "eth0"


def test_an_address_without_a_way_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have several, such as one of IPv6 where the machine has none."""
    let_names_mean(monkeypatch, UNREACHABLE, ("127.0.0.1", 29500))
    assert find_interface(store_with(1, OTHER), FIRST, 1) == "eth0"


def test_a_rank_whose_interface_is_named_needs_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    let_names_mean(monkeypatch, UNREACHABLE)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert find_interface(store_with(1, OTHER), FIRST, 1) is None
    assert find_interface(store_with(1, Route(True, error="unknown")), FIRST, 1) is None


def test_a_rank_without_a_way_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    let_names_mean(monkeypatch, ("127.0.0.1", 29500))
    with pytest.raises(UserError, match=r"rank 1 finds no way to MASTER_ADDR, node0: unknown name\ngive .*IFNAME"):
        find_interface(store_with(1, Route(False, error="unknown name")), FIRST, 1)


def find_no_way() -> None:
    setattr(meeting, "_route", lambda _: Route(False, error="unknown name"))  # noqa: B010
    take_part(lambda _: None)


def test_ranks_without_a_way_end_with_one_message() -> None:
    done = spawn(2, find_no_way, environment={"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, timeout=60)
    expect_end(done, Code.CURE, "error: rank 0 finds no way to MASTER_ADDR, 127.0.0.1: unknown name\n")
