"""How ranks find one another: what that asks of the store of rank 0, its limits, and over which network they speak.

Two machines that do so: tests/end_to_end/test_several_machines.py."""

import json
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from support.commands import assert_refusal, wait_for
from support.faults import hold, replace
from support.processes import spawn, start, take_part

from data_prep.common.launchers import World
from pretraining.processes import meeting, signing
from pretraining.processes.ending import Code
from pretraining.processes.meeting import Route, ask_rank_0, find_interface
from pretraining.processes.signing import LOOKS_A_SECOND, SignedStore


class CountingStore:
    """A rank's way to a store of this process, which counts the keys that it asks for and sets."""

    def __init__(self, store: Any) -> None:
        self._store, self.keys = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(keys: str | list[str], *more: Any) -> Any:
            counted = [keys] if isinstance(keys, str) else keys
            self.keys += 0 if name == "check" else len(counted)
            return getattr(self._store, name)(keys, *more)

        return call


def ask_together(ranks: int, ask: Any) -> tuple[list[Any], list[int]]:
    """The answers that so many ranks get, and how many keys each of them touched."""
    shared = dist.HashStore()  # type: ignore[attr-defined]
    stores = [CountingStore(shared) for _ in range(ranks)]

    def act(rank: int) -> Any:
        return ask(SignedStore(stores[rank], b"secret"), World(rank, ranks, 0, 1, port=29500))

    with ThreadPoolExecutor(ranks) as threads:
        answers = list(threads.map(act, range(ranks)))
    return answers, [store.keys for store in stores]


def ask_for_words(store: SignedStore, world: World) -> str:
    return ask_rank_0(store, world, "it", f"w{world.rank}", " ".join, 9)


@pytest.mark.parametrize("ask", [ask_for_words, partial(find_interface, patience=9)])
def test_what_ranks_ask_of_the_store_grows_with_their_number_alone(ask: Any) -> None:
    """Not with its square: rank 0 reads what all say, and the others one answer."""
    (answers, few), (_, many) = (ask_together(ranks, ask) for ranks in (4, 32))
    assert ask is not ask_for_words or answers == ["w0 w1 w2 w3"] * 4
    assert len({*few[1:], *many[1:]}) == 1, "what others ask does not depend on how many there are"
    assert many[0] <= 8 * few[0]


def wait_until_rank_0_gave_up(gate: Path) -> None:
    """Rank 0 waits for rank 1 alone, which comes, and then hears nothing until the gate is open."""
    signing.READ_SECONDS = 0.1
    wait = meeting._wait_for_all

    def wait_late(store: SignedStore, world: World, patience: float) -> None:
        if world.rank:
            hold(gate)
        wait_for(lambda: world.rank or store.get("joined/1"))
        wait(store, world, patience)

    replace(meeting, "_wait_for_all", wait_late)
    take_part(meet, patience=60 if int(os.environ["RANK"]) else 0)


def test_a_rank_that_wakes_after_rank_0_gave_up_ends_with_one_message(tmp_path: Path) -> None:
    run = start(3, wait_until_rank_0_gave_up, tmp_path / "gate", come=2)
    first = run.wait(60, 0)[0]
    assert (first.code, first.errors.partition("\n")[0]) == (2, "error: rank 2 of 3 did not come in 0 s"), first
    (tmp_path / "gate").touch()
    late = run.wait(60)[1]
    assert (late.code, late.errors.count("\n")) == (Code.RANK_LOST, 2), late.errors
    assert late.errors.startswith("error: another rank has ended, or cannot be reached any more: ")


@pytest.mark.parametrize("ranks", [2, 64, 8192])
def test_ranks_that_wait_leave_the_store_in_peace(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in which rank 0 still waits for somebody."""
    now, store = [0.0], Mock(check=Mock(return_value=False))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    signed, world = SignedStore(store, b"secret"), World(1, ranks, 1, 2)
    assert_refusal("gave up waiting", meeting._wait_for_all, signed, world, 300)
    assert now[0] > 300
    assert store.check.call_count * ranks / now[0] <= 1.01 * LOOKS_A_SECOND


@pytest.mark.parametrize(
    ("ranks", "agent", "told"),
    [
        (500, "", None),
        (1024, "", r"rank 0 may have 2,000 files .*1,024 ranks need 2,304\n.*ulimit -n 2304"),
        (1024, "True", r"torchrun may have 1,024 files .*1,024 ranks need 2,304\n"),
    ],
)
def test_ranks_take_as_many_files_as_they_will_need(
    ranks: int, agent: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 2000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    monkeypatch.setattr(meeting, "_open_store", Mock(side_effect=OSError("in use")))
    assert_refusal(told or "in use", meeting.meet, World(0, ranks, 0, 8, port=29500), 1, Path())
    assert set_to == [(min(2000, 256 + 2 * ranks), 2000)]


def meet(_: World) -> None:
    pass


def test_ranks_that_torchrun_begins_again_meet_in_its_old_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for count in "01":
        held = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": count}
        assert [rank.code for rank in spawn(2, take_part, meet, environment=held, port=store.port)] == [0, 0]


def test_more_ranks_have_more_time_to_be_answered() -> None:
    """A store that asks for the name behind each connection answers the last of many ranks late."""
    seconds = [meeting._answer_seconds(World(0, ranks, 0, 1)) for ranks in (2, 1024)]
    assert seconds[0] < 16
    assert seconds[1] > 1024 * 3 * 0.03, "three connections of each rank, 30 ms each"


HERE = ("127.0.0.1", 29500)
UNREACHABLE = ("255.255.255.255", 29500)
"""to which Linux refuses to connect: it means all machines"""
OTHER, LOST = Route(False, "10.0.0.2", "10.0.0.1"), Route(False, error="unknown name")


@pytest.mark.parametrize(
    ("addresses", "named", "other", "found"),
    [
        ([HERE], None, OTHER, "eth0"),  # rank 0 hears what it is to others
        ([UNREACHABLE, HERE], None, OTHER, "eth0"),  # a name may have several, such as one of IPv6 that leads nowhere
        ([UNREACHABLE], "ib0", OTHER, None),  # whose interface is named needs no way
        ([UNREACHABLE], "ib0", Route(True, error="unknown"), None),
        ([UNREACHABLE], None, OTHER, r"rank 0 finds no way to MASTER_ADDR, node0: .*\ngive .*IFNAME"),
        ([HERE], None, LOST, r"rank 1 finds no way to MASTER_ADDR, node0: unknown name\ngive .*IFNAME"),
    ],
)
def test_the_interface_that_leads_to_the_other_ranks(
    addresses: Any, named: str | None, other: Route, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    answers = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    monkeypatch.setattr(meeting, "_interfaces", lambda: {"lo": {"127.0.0.1"}, "eth0": {"10.0.0.1"}})
    monkeypatch.setattr(signing, "READ_SECONDS", 0)  # nobody reads why rank 0 ends
    store = SignedStore(dist.HashStore(), b"secret")  # type: ignore[attr-defined]
    store.set("address/1", json.dumps(other))
    first = World(0, 2, 0, 1, address="node0", port=29500)
    if found and "no way" in found:
        assert_refusal(found, find_interface, store, first, 1)
    else:
        assert find_interface(store, first, 1) == found
