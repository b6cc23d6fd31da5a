"""Ranks that fail, die or hang end the run on all, named; and nothing else does."""

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.commands import wait_for
from support.processes import Done, expect_end, spawn, start, take_part

from data_prep.common.files import read_json
from data_prep.common.launchers import World
from pretraining.processes import watchdog
from pretraining.processes.ending import ENDED, STACKS, Code
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

RANK_0_GONE = "error: rank 0 has ended, or its machine is gone\n"
RANK_1_GONE = "error: rank 1 has ended, or cannot be reached any more\nits own output or its machine's log says why\n"
KILLED = -signal.SIGKILL

pytestmark = pytest.mark.timed

AT_ONCE = 4
"""Scenarios that go on at the same time: their ranks mostly wait, and no test of another file runs meanwhile."""
Ends = Mapping[str, Sequence[Done]]


@pytest.fixture(scope="module")
def ended() -> Ends:
    """What became of the ranks of all scenarios, by their names."""
    found: dict[str, Sequence[Done]] = {}
    waiting = [*SCENARIOS.items()]
    while waiting:
        batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        runs = {name: start(ranks, take_part, work) for name, (ranks, work) in batch}
        found |= {name: run.wait(60) for name, run in runs.items()}
    return found


class Torchrun:
    """Holds the store, which does not end with rank 0."""

    def __init__(self) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.start = partial(start, environment={"TORCHELASTIC_USE_AGENT_STORE": "True"}, port=self.store.port)


def assert_codes(done: Sequence[Done], *codes: int) -> None:
    assert [rank.code for rank in done] == [*codes], done


def reduce(*_: object) -> None:
    dist.all_reduce(torch.ones(1))


def wait_long(*_: object) -> None:
    time.sleep(60)


def wait_in_a_pause(watch: Watch) -> None:
    with watch.pause():
        wait_long()


def signal_one(number: int, chosen: int, go_on: Callable[[Watch], None], silence: float, world: World) -> None:
    """After an all-reduce, a rank gets a signal that kills or stops it, and the others go on."""
    with Watch(world, every=0.3, silence=silence) as watch:
        reduce()
        if world.rank == chosen:
            os.kill(os.getpid(), number)
        go_on(watch)


def test_rank_0_is_gone_for_those_in_an_all_reduce(ended: Ends) -> None:
    assert_codes(ended["rank 0 dies"], KILLED, 76, 76)
    assert [rank.errors for rank in ended["rank 0 dies"]] == ["", RANK_0_GONE, ""]


@pytest.mark.parametrize("name", ["rank 1 dies", "rank 1 dies while others pause"])
def test_a_killed_rank_is_named_by_those_that_wait_for_it_and_by_those_that_do_not(ended: Ends, name: str) -> None:
    assert_codes(ended[name], 76, KILLED, 76)
    assert [rank.output + rank.errors for rank in ended[name]] == [RANK_1_GONE, "", ""]


@pytest.mark.parametrize(("stopped", "speaker", "message"), [(1, 0, RANK_1_GONE), (0, 1, RANK_0_GONE)])
def test_a_stopped_rank_is_missed_and_ends_when_it_goes_on(stopped: int, speaker: int, message: str) -> None:
    run = start(3, take_part, partial(signal_one, signal.SIGSTOP, stopped, reduce, 3.0))
    others = [rank for rank in range(3) if rank != stopped]
    done = run.wait(30, *others)
    assert done[stopped].code is None
    assert [done[rank].code for rank in others] == [76, 76]
    assert [done[rank].errors for rank in (speaker, 2)] == [message, ""]
    run.signal(signal.SIGCONT, stopped)
    assert run.wait(20)[stopped].code == 76


def test_the_others_end_when_rank_0_is_killed_but_not_its_store() -> None:
    torchrun = Torchrun()
    done = torchrun.start(3, take_part, partial(signal_one, signal.SIGKILL, 0, wait_long, 3.0)).wait(30)
    assert_codes(done, KILLED, 76, 76)
    assert [rank.errors for rank in done] == ["", RANK_0_GONE, ""]


def lose_rank_0(run: Path, world: World) -> None:
    with Control(world), Watch(world, every=0.2, run=run):
        reduce()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        reduce()


def test_who_is_asked_to_stop_while_rank_0_is_gone_says_so_before_torchrun_kills_it(tmp_path: Path) -> None:
    torchrun = Torchrun()
    run = torchrun.start(3, take_part, partial(lose_rank_0, tmp_path))
    wait_for(lambda: not run.goes_on(0))
    run.signal(signal.SIGTERM, 1, 2)
    done = run.wait(15)
    assert_codes(done, KILLED, 76, 76)
    assert done[1].errors.startswith(RANK_0_GONE)
    assert read_json(tmp_path / ENDED)["code"] == 76


def work_for_long(run: Path, world: World) -> None:
    with Watch(world, every=0.2, silence=4.0):
        (run / str(world.rank)).touch()
        wait_long()


def test_ranks_that_lose_torchrun_do_not_say_that_rank_0_is_gone(tmp_path: Path) -> None:
    torchrun = Torchrun()
    run = torchrun.start(2, take_part, partial(work_for_long, tmp_path))
    wait_for(lambda: len([*tmp_path.iterdir()]) == 2 or not run.goes_on())
    del torchrun
    told = "error: torchrun has ended on the machine of rank 0, or that machine is gone\n"
    assert [(rank.code, rank.errors) for rank in run.wait(20)] == [(76, told), (76, "")]


# Ranks that hang


def read_a_dead_disk() -> None:
    time.sleep(60)


def hang_as_rank_2(run: Path, world: World) -> None:
    with Watch(world, every=0.2, hang=2.0, run=run) as watch:
        watch.mark()
        reduce()
        if world.rank == 2:
            read_a_dead_disk()
        watch.mark()
        reduce()


HANGS = "error: the others wait for rank 2, which did not move for 2 s\n"


class MarksOfAGpu(watchdog.Marks):
    """Stands for a GPU, which does not come to what its host has launched once it is stuck."""

    stuck = False

    def __init__(self, _: torch.device) -> None:
        super().__init__(watchdog.HOST)

    def add(self) -> None:
        if not self.stuck:
            super().add()


def hang_on_the_gpu_of_rank_2(world: World) -> None:
    setattr(watchdog, "Marks", MarksOfAGpu)  # noqa: B010
    with Watch(world, every=0.2, hang=2.0, device=torch.device("cuda")) as watch:
        watch.mark()
        MarksOfAGpu.stuck = world.rank == 2
        watch.mark()
        watch.mark()
        time.sleep(20)  # every host has come to the same place


def test_a_gpu_that_hangs_is_named_although_all_hosts_run_ahead(ended: Ends) -> None:
    expect_end(ended["a GPU hangs"], Code.RANK_LOST, HANGS)


def test_a_hang_leaves_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    done = spawn(3, take_part, partial(hang_as_rank_2, tmp_path), timeout=30)
    expect_end(done, Code.RANK_LOST, HANGS)
    assert done[0].errors.endswith(f"the stacks of the ranks that still run are in {tmp_path / STACKS}\n")
    stacks = sorted((tmp_path / STACKS).iterdir())
    assert [path.name for path in stacks] == ["rank-00000.txt", "rank-00001.txt", "rank-00002.txt"]
    waits = r"(?m)in (all_reduce|_wait_to_be_ended)$"  # for rank 2, or with word that it has ended
    for pattern, found in ((read_a_dead_disk.__name__, [False, False, True]), (waits, [True, True, False])):
        assert [bool(re.search(pattern, path.read_text())) for path in stacks] == found
    noted = read_json(tmp_path / ENDED)
    assert (noted["code"], noted["rank"]) == (76, 0)
    assert f"error: {noted['reason']}".startswith(HANGS)


def pause_longer_than_a_hang(world: World) -> None:
    with Watch(world, every=0.1, hang=1.0) as watch:
        watch.mark()
        if world.rank == 1:
            with watch.pause(), watch.pause():
                pass
            with watch.pause():
                time.sleep(2)
    print("done")


def test_long_work_within_a_pause_hangs_not(ended: Ends) -> None:
    """Not even for the others, which wait at the end."""
    done = ended["rank 1 pauses"]
    assert [(rank.code, rank.output, rank.errors) for rank in done] == [(0, "done\n", "")] * 2


SCENARIOS: dict[str, tuple[int, Callable[[World], None]]] = {
    "rank 0 dies": (3, partial(signal_one, signal.SIGKILL, 0, reduce, 200.0)),
    "rank 1 dies": (3, partial(signal_one, signal.SIGKILL, 1, reduce, 200.0)),
    "rank 1 dies while others pause": (3, partial(signal_one, signal.SIGKILL, 1, wait_in_a_pause, 3.0)),
    "a GPU hangs": (3, hang_on_the_gpu_of_rank_2),
    "rank 1 pauses": (2, pause_longer_than_a_hang),
}
"""How many ranks do what."""

# Many ranks


@pytest.mark.parametrize("ranks", [2, 1024, 100_000])
def test_silence_is_found_in_time_among_any_number_of_ranks(ranks: int) -> None:
    watch = Watch(World(0, ranks, 0, 2))
    assert 1.0 <= watch._every <= 10.0, "several beats within the minute after which a rank counts as gone"
    assert ranks <= 1024 * watch._every or watch._every == 10.0, "rank 0 hears them beside its own work"
