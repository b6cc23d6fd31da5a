"""How ranks find one another: what that asks of the store of rank 0, its limits, and over which network they speak.

Two machines that do so: tests/end_to_end/test_several_machines.py."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.faults import replace
from support.processes import spawn, start
from support.ranks import expect_end, take_part

from data_prep.common.errors import UserError
from data_prep.common.launchers import World, find_world
from pretraining.processes import meeting, signing
from pretraining.processes.ending import Code
from pretraining.processes.group import connect, disconnect, open_stores
from pretraining.processes.meeting import Route, ask_rank_0, find_interface
from pretraining.processes.signing import LOOKS_A_SECOND, SignedStore


class CountingStore:
    """A rank's way to a store of this process, which counts the keys that it asks for and sets."""

    def __init__(self, store: Any) -> None:
        self._store, self.keys = store, 0

    def set(self, key: str, value: str) -> None:
        self.keys += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.keys += 1
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.keys += len(keys)
        self._store.wait(keys, limit)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.keys += len(keys)
        return [bytes(value) for value in self._store.multi_get(keys)]

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))


def ask_together(ranks: int, ask: Any) -> tuple[list[Any], list[int]]:
    """The answers that so many ranks get, and how many keys each of them touched."""
    shared = dist.HashStore()  # type: ignore[attr-defined]
    stores = [CountingStore(shared) for _ in range(ranks)]

    def act(rank: int) -> Any:
        return ask(SignedStore(stores[rank], b"secret"), World(rank, ranks, 0, 1, port=29500))

    with ThreadPoolExecutor(ranks) as threads:
        answers = list(threads.map(act, range(ranks)))
    return answers, [store.keys for store in stores]


def join_words(words: Sequence[str]) -> str:
    return " ".join(words)


def test_all_hear_what_rank_0_concludes() -> None:
    answers, _ = ask_together(3, lambda store, world: ask_rank_0(store, world, "it", f"w{world.rank}", join_words, 9))
    assert answers == ["w0 w1 w2"] * 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda store, world: ask_rank_0(store, world, "it", "word", join_words, 9),
        lambda store, world: find_interface(store, world, 9),
    ],
)
def test_what_ranks_ask_of_the_store_grows_with_their_number_alone(ask: Any) -> None:
    """Not with its square: rank 0 reads what all say, and the others one answer."""
    few, many = (ask_together(ranks, ask)[1] for ranks in (4, 32))
    assert set(few[1:]) == set(many[1:]), "what others ask does not depend on how many there are"
    assert len(set(many[1:])) == 1
    assert many[0] <= 8 * few[0]


def pause_before_all_are_there() -> None:
    signing.READ_SECONDS = 0.1
    if os.environ["RANK"] == "1":
        replace(meeting, "_wait_for_all", partial(pause_and_call, meeting._wait_for_all))
    take_part(lambda _: None, patience=8 if os.environ["RANK"] == "0" else 60)


def pause_and_call(function: Callable[..., None], *arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    function(*arguments)


def test_a_rank_that_wakes_after_rank_0_gave_up_ends_with_one_message() -> None:
    run = start(3, pause_before_all_are_there, come=2)
    first = run.wait(60, 0)[0]
    assert (first.code, first.errors.partition("\n")[0]) == (2, "error: rank 2 of 3 did not come in 8 s"), first
    run.signal(signal.SIGCONT, 1)
    late = run.wait(60)[1]
    assert (late.code, late.errors.count("\n")) == (Code.RANK_LOST, 2), late.errors
    assert late.errors.startswith("error: another rank has ended, or cannot be reached any more: ")


class NeverComplete:
    """A store in which rank 0 still waits for somebody."""

    def __init__(self) -> None:
        self.looks = 0

    def check(self, _: list[str]) -> bool:
        self.looks += 1
        return False

    def set(self, *_: object) -> None:
        """Takes what a rank writes when it gives up."""


@pytest.mark.parametrize("ranks", [2, 64, 1024, 8192])
def test_ranks_that_wait_leave_the_store_in_peace(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, store = [0.0], NeverComplete()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(UserError, match="gave up waiting"):
        meeting._wait_for_all(SignedStore(store, b"secret"), World(1, ranks, 1, 2), 300)
    assert now[0] > 300
    assert store.looks * ranks / now[0] <= 1.01 * LOOKS_A_SECOND


def limit_open_files(soft: int, hard: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pretends that this process may have so many files open; what it sets."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    return found


@pytest.mark.parametrize(
    ("agent", "who", "limit"), [("", "rank 0", "2,000"), ("True", "torchrun", "1,024")], ids=["rank 0", "torchrun"]
)
def test_too_many_ranks_for_files_to_be_open(agent: str, who: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    limit_open_files(1024, 2000, monkeypatch)
    with pytest.raises(UserError, match=rf"{who} may have {limit} files .*1,024 ranks need 2,304\n.*ulimit -n 2304"):
        meeting.meet(World(0, 1024, 0, 8, port=29500), 1, Path())


def meet_with_few_files() -> object:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    connect(find_world(os.environ), torch.device("cpu"), timeout=60)
    disconnect()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200, soft


def test_ranks_take_as_many_files_as_they_will_need() -> None:
    assert [rank.result[0] for rank in spawn(2, meet_with_few_files)] == [True, True]


def come_late_to_the_first_operation() -> object:
    """As with NCCL, whose ranks ask the store for what rank 0 says at the first operation."""
    meeting.ANSWER_SECONDS = meeting.ANSWER_SECONDS_OF_A_RANK = 1.5
    world = find_world(os.environ)
    connect(world, torch.device("cpu"), timeout=60)
    store = open_stores()[0].raw
    if world.rank == 0:
        time.sleep(4)
        store.set("said", "now")
    said = store.get("said").decode()
    disconnect()
    return said


@pytest.mark.slow
def test_a_rank_may_come_later_than_a_store_may_answer() -> None:
    assert [rank.result for rank in spawn(2, come_late_to_the_first_operation)] == ["now", "now"]


def meet_and_part() -> object:
    connect(find_world(os.environ), torch.device("cpu"), timeout=60)
    disconnect()
    return "met"


def test_ranks_that_torchrun_begins_again_meet_in_its_old_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for count in "01":
        held = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": count}
        assert [rank.result for rank in spawn(2, meet_and_part, environment=held, port=store.port)] == ["met"] * 2


def test_more_ranks_have_more_time_to_be_answered() -> None:
    """A store that asks for the name behind each connection answers the last of many ranks late."""
    seconds = [meeting._answer_seconds(World(0, ranks, 0, 1)) for ranks in (2, 1024)]
    assert seconds[0] < 16
    assert seconds[1] > 1024 * 3 * 0.03, "three connections of each rank, 30 ms each"


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
    monkeypatch.setattr(signing, "READ_SECONDS", 0)  # there is nobody who would read it
    with pytest.raises(UserError, match=r"rank 1 finds no way to MASTER_ADDR, node0: unknown name\ngive .*IFNAME"):
        find_interface(store_with(1, Route(False, error="unknown name")), FIRST, 1)


def find_no_way() -> None:
    setattr(meeting, "_route", lambda _: Route(False, error="unknown name"))  # noqa: B010
    take_part(lambda _: None)


def test_ranks_without_a_way_end_with_one_message() -> None:
    done = spawn(2, find_no_way, environment={"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, timeout=60)
    expect_end(done, Code.CURE, "error: rank 0 finds no way to MASTER_ADDR, 127.0.0.1: unknown name\n")
