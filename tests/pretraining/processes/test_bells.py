"""Ranks that tell one another small things: through pipes on one machine, by votes of few turns, and by gloo."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.processes import Done, free_port, spawn, start, wait_for
from support.ranks import take_part
from support.training import connect_ranks, run_connected
from torch import Tensor

from data_prep.common.launchers import World
from pretraining.processes import bells, group
from pretraining.processes.bells import hang_bells
from pretraining.processes.group import add_up, disconnect, find_greatest, gather, wait_for_all
from pretraining.processes.watchdog import Watch

TURNS = 300
FILES = Path("/proc/self/fd")

pytestmark = pytest.mark.skipif(not FILES.exists(), reason="bells are for Linux")


def ring_often() -> object:
    """Messages of changing lengths, from ranks that come now early and now late."""
    rank, heard = dist.get_rank(), []
    for turn in range(TURNS):
        if (turn + rank) % 7 == 0:
            time.sleep(0.001)
        heard.append(group._bells.ring(bytes([turn % 256, rank]) * (turn % 50 + 1)))
    return heard


def test_all_hear_what_all_say_in_their_order() -> None:
    wanted = [[bytes([turn % 256, rank]) * (turn % 50 + 1) for rank in range(3)] for turn in range(TURNS)]
    assert [heard == wanted for heard in run_connected(3, ring_often)] == [True] * 3


def agree_without_gloo() -> object:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patched:
        for name in ("barrier", "all_reduce", "all_gather"):
            patched.setattr(dist, name, Mock(side_effect=AssertionError("gloo was asked")))
        wait_for_all()
        time.sleep(0.3 * (rank == 1))
        came = time.monotonic()  # the clock of the machine, the same for all ranks
        wait_for_all()
        left = time.monotonic()
        greatest = find_greatest(torch.tensor([rank, -rank], dtype=torch.float64))
        total = add_up(torch.tensor(0.1, dtype=torch.float64) * (rank + 1))
    return came, left, greatest.tolist(), float(total)


def test_ranks_wait_vote_and_add_up_by_their_bells() -> None:
    total = float(torch.tensor([0.1, 0.2, 0.1 * 3], dtype=torch.float64).sum())
    done = run_connected(3, agree_without_gloo)
    assert max(came for came, *_ in done) <= min(left for _, left, *_ in done)
    assert [found for _, _, *found in done] == [[[2.0, 0.0], total]] * 3


# Without bells


def have_too_many_open(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(os, "pipe", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "is elsewhere": lambda patched: patched.setattr(bells, "identify_system", lambda: "another"),
    "knows no system": lambda patched: patched.setattr(bells, "identify_system", lambda: None),
    "is locked out": lambda patched: patched.setattr(bells.Door, "path", property(lambda _: "/proc/1/fd/99999")),
    # processes have other numbers there, so that a path leads to a file of somebody else, which stays as it is
    "is led astray": lambda patched: patched.setattr(bells.Door, "path", property(lambda _: os.environ["ASTRAY"])),
    "has too many files open": have_too_many_open,
}


def hang_in_vain() -> object:
    """The last rank has each fault when they hang bells again: whether there are none, and how many files stay open."""
    rank, ranks, found = *group.place(), list[bool]()
    gc.collect()  # closes files of what is gone already
    files = len(os.listdir(FILES))
    for fault in FAULTS.values():
        with pytest.MonkeyPatch.context() as patched:
            if rank == ranks - 1:
                fault(patched)
            found.append(not hang_bells(rank, ranks, gather, 60))
    return found, len(os.listdir(FILES)) - files


def test_where_one_has_no_bells_none_has(tmp_path: Path) -> None:
    astray = tmp_path / "astray"
    astray.write_text("of somebody else")
    found = run_connected(3, hang_in_vain, environment={"ASTRAY": str(astray)})
    assert found == [([True] * len(FAULTS), 0)] * 3
    assert astray.read_text() == "of somebody else"


# A rank that does not come


def come_late() -> object:
    """Rank 1 comes when rank 0 has given up its bell; both go on by gloo, where nothing of before is heard."""
    rank = dist.get_rank()
    group._bells.patience = 0.3 if rank == 0 else 60
    if rank == 1:
        wait_for(lambda: any(event & select.POLLHUP for _, event in group._bells._polls[0].poll(0)))
    wait_for_all()
    gone = not group._bells
    return gone, float(find_greatest(torch.tensor([float(rank)]))), float(add_up(torch.tensor(1.0 + rank)))


def test_after_a_bell_was_not_heard_all_agree_by_gloo() -> None:
    assert run_connected(2, come_late) == [(True, 1.0, 3.0)] * 2


def meet_at(ports: list[int]) -> object:
    """Each time at another port: the store of before may still answer at its own."""
    files = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        connect_ranks()
        assert group._bells
        wait_for_all()
        disconnect()
        names = [os.readlink(path) for path in FILES.iterdir() if path.is_symlink()]
        files.append(sum(name.startswith("pipe:") for name in names))
    return len(set(files))


def test_ranks_that_meet_again_have_new_bells() -> None:
    """And none of those of before."""
    done = spawn(2, meet_at, [free_port() for _ in range(3)])
    assert [(rank.result, rank.errors) for rank in done] == [(1, "")] * 2


def wait_after_a_death(world: World) -> None:
    with Watch(world, every=0.3):
        wait_for_all()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_all()


def test_a_killed_rank_is_named_by_those_that_wait_for_its_bell() -> None:
    done: list[Done] = start(3, take_part, wait_after_a_death).wait(60)
    assert [rank.code for rank in done] == [76, -signal.SIGKILL, 76], done
    assert done[0].errors.startswith("error: rank 1 has ended, or cannot be reached any more\n")
    assert done[2].errors == ""


class AtOnce:
    """Something that needs no waiting for."""

    def wait(self) -> None:
        pass


class PretendedGroup:
    """A rank among threads that hand one another tensors."""

    def __init__(self, rank: int, boxes: list[list[Queue[Tensor]]]) -> None:
        self._rank, self._boxes = rank, boxes
        self.sent: list[int] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._boxes)

    def send(self, tensors: list[Tensor], to: int, _: int) -> AtOnce:
        self._boxes[to][self._rank].put(tensors[0].clone())
        self.sent.append(to)
        return AtOnce()

    def recv(self, tensors: list[Tensor], source: int, _: int) -> AtOnce:
        tensors[0].copy_(self._boxes[self._rank][source].get(timeout=30))
        return AtOnce()


def vote(own: list[list[float]]) -> tuple[list[list[float]], list[PretendedGroup]]:
    """What ranks that bring these numbers find."""
    ranks = len(own)
    boxes: list[list[Queue[Tensor]]] = [[Queue() for _ in range(ranks)] for _ in range(ranks)]
    groups = [PretendedGroup(rank, boxes) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        found = threads.map(find_greatest, map(torch.tensor, own), groups)
        return [each.tolist() for each in found], groups


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 13, 33])
def test_all_find_the_greatest_of_each_number(ranks: int) -> None:
    for speaker in {0, ranks // 2, ranks - 1}:
        own = [[4.0 * (rank == speaker), float(rank)] for rank in range(ranks)]
        found, _ = vote(own)
        assert found == [[4.0, ranks - 1.0]] * ranks
        assert own[0][1] == 0.0


def test_a_vote_of_many_takes_few_turns_and_few_acquaintances() -> None:
    """Where gloo's own all-reduce would hand numbers around all of them, twice."""
    _, groups = vote([[0.0]] * 100)
    assert {len(group.sent) for group in groups} == {7}
