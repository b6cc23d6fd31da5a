"""Ranks of one machine that tell one another small things through pipes: what they hear, and when one does not come."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import Done, free_port, spawn, start
from support.ranks import take_part

from data_prep.common.launchers import World, find_world
from pretraining.processes import bells, group
from pretraining.processes.bells import NO_BELLS, hang_bells
from pretraining.processes.group import add_up, connect, disconnect, find_greatest, gather, wait_for_all
from pretraining.processes.watchdog import Watch

TURNS = 300
FILES = Path("/proc/self/fd")

pytestmark = pytest.mark.skipif(not FILES.exists(), reason="bells are for Linux")


def meet() -> World:
    world = find_world(os.environ)
    connect(world, torch.device("cpu"), timeout=60)
    return world


def not_by_gloo(*_: object, **__: object) -> None:
    raise AssertionError("gloo was asked")


def ring_often() -> object:
    """Messages of changing lengths, from ranks that come now early and now late."""
    world, heard = meet(), []
    for turn in range(TURNS):
        if (turn + world.rank) % 7 == 0:
            time.sleep(0.001)
        heard.append(group._bells.ring(bytes([turn % 256, world.rank]) * (turn % 50 + 1)))
    disconnect()
    return heard


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_hear_what_all_say_in_their_order(ranks: int) -> None:
    wanted = [[bytes([turn % 256, rank]) * (turn % 50 + 1) for rank in range(ranks)] for turn in range(TURNS)]
    done = spawn(ranks, ring_often)
    assert [(rank.errors, rank.result == wanted) for rank in done] == [("", True)] * ranks


def agree_without_gloo() -> object:
    world = meet()
    with pytest.MonkeyPatch.context() as patched:
        for name in ("barrier", "all_reduce", "all_gather"):
            patched.setattr(dist, name, not_by_gloo)
        wait_for_all()
        start = time.monotonic()
        time.sleep(0.5 * (world.rank == 1))
        wait_for_all()
        waited = time.monotonic() - start
        greatest = find_greatest(torch.tensor([world.rank, -world.rank], dtype=torch.float64))
        total = add_up(torch.tensor(0.1, dtype=torch.float64) * (world.rank + 1))
    disconnect()
    return waited > 0.4, greatest.tolist(), float(total)


def test_ranks_wait_vote_and_add_up_by_their_bells() -> None:
    done = spawn(3, agree_without_gloo)
    total = torch.tensor([0.1, 0.2, 0.1 * 3], dtype=torch.float64).sum()
    assert [(rank.result, rank.errors) for rank in done] == [((True, [2.0, 0.0], float(total)), "")] * 3


# Without bells


def hang_in_vain(fault: Callable[[pytest.MonkeyPatch], object]) -> object:
    """The last rank has a fault when they hang bells again: whether there are none, and how many files stay open."""
    world = meet()
    files = len(os.listdir(FILES))
    with pytest.MonkeyPatch.context() as patched:
        if world.rank == world.size - 1:
            fault(patched)
        found = hang_bells(world.rank, world.size, gather, 60)
    left = len(os.listdir(FILES)) - files
    disconnect()
    return not found, left


def be_elsewhere(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(bells, "system", lambda: "another")


def know_no_system(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(bells, "system", lambda: None)


def be_locked_out(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(bells.Door, "path", property(lambda _: "/proc/1/fd/99999"))


def be_led_astray(patched: pytest.MonkeyPatch) -> None:
    """Processes have other numbers there, so that a path leads to a file of somebody else, which stays as it is."""
    patched.setattr(bells.Door, "path", property(lambda _: os.environ["ASTRAY"]))


def have_too_many_open(patched: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    patched.setattr(os, "pipe", fail)


@pytest.mark.parametrize("fault", [be_elsewhere, know_no_system, be_locked_out, be_led_astray, have_too_many_open])
def test_where_one_has_no_bells_none_has(fault: Callable[[pytest.MonkeyPatch], object], tmp_path: Path) -> None:
    astray = tmp_path / "astray"
    astray.write_text("of somebody else")
    done = spawn(3, hang_in_vain, fault, environment={"ASTRAY": str(astray)})
    assert [(rank.result, rank.errors) for rank in done] == [((True, 0), "")] * 3
    assert astray.read_text() == "of somebody else"


def wait_without_bells() -> object:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group, "hang_bells", lambda *_: NO_BELLS)
        world = meet()
    wait_for_all()
    found = float(find_greatest(torch.tensor([float(world.rank)]))), float(add_up(torch.tensor(float(world.rank))))
    disconnect()
    return found


def test_without_bells_they_agree_by_gloo() -> None:
    done = spawn(2, wait_without_bells)
    assert [(rank.result, rank.errors) for rank in done] == [((1.0, 1.0), "")] * 2


# A rank that does not come


def come_late() -> object:
    """Rank 1 comes when rank 0 has given up its bell; both go on by gloo, where nothing of before is heard."""
    world = meet()
    group._bells.patience = 0.3 if world.rank == 0 else 60
    time.sleep(1.0 * world.rank)
    wait_for_all()
    gone = not group._bells
    found = float(find_greatest(torch.tensor([float(world.rank)]))), float(add_up(torch.tensor(1.0 + world.rank)))
    disconnect()
    return gone, found


def test_after_a_bell_was_not_heard_all_agree_by_gloo() -> None:
    done = spawn(2, come_late)
    assert [(rank.result, rank.errors) for rank in done] == [((True, (1.0, 3.0)), "")] * 2


def meet_at(ports: list[int]) -> object:
    """Each time at another port: the store of before may still answer at its own."""
    files = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        meet()
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
