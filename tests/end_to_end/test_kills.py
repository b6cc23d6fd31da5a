"""Runs whose ranks are killed: the others end by themselves, and the same command ends where the straight run ends."""

import random
import re
import signal
from functools import partial
from pathlib import Path

import pytest
from support.commands import wait_for
from support.faults import all_of, hold_saves_from, kill_one_after, miss_ranks_after, stay_in_the_group
from support.training import SAVES, Place, assert_ended, assert_same, launch, train, train_straight

from pretraining.checkpoint.record import FOLDER
from pretraining.processes.ending import Code


def kill(command: list[str], checkpoints: Path, step: int, draw: random.Random, save: bool) -> None:
    """Kills a rank at a random moment after a step, or inside a save; the other must end by itself."""
    victim, gate = draw.randrange(2), checkpoints.parent.parent / f"gate-{step}"
    if save:
        held, soon = partial(hold_saves_from, step, gate), partial(miss_ranks_after, 20.0)
        run = launch(command, fault=partial(all_of, held, soon))
        wait_for(gate.with_suffix(".held").exists)
        run.signal(signal.SIGKILL, victim)
    else:
        run = launch(command, fault=partial(kill_one_after, step, victim, draw.uniform(0, 0.02)))
    done = run.wait()
    assert {rank.code for rank in done} == {-signal.SIGKILL, Code.RANK_LOST}, done
    assert done[victim].code == -signal.SIGKILL
    assert re.match(rf"error: rank {victim} has ended, or ", done[1 - victim].errors), done
    if save and victim == 0:
        assert list(checkpoints.glob("*.tmp")), "it was to be killed inside a save"


def kill_and_compare(place: Place, wanted: Path, more: list[str], last: int, kills: int) -> None:
    """Kills at so many moments that are uniform over the run, every third inside a save."""
    draw, command = random.Random(kills), place.command("run", *more)
    for number, step in enumerate(sorted(draw.sample(range(1, last), kills))):
        kill(command, place.folder / "run" / FOLDER, step, draw, save=number % 3 == 1)
    done = train(command)
    assert [rank.code for rank in done] == [0, 0]
    assert "continues after step" in done[0].output
    assert_same(place.folder / "run", wanted)


def test_a_run_whose_ranks_are_killed_is_the_straight_one(place: Place, straight: Path) -> None:
    kill_and_compare(place, straight, SAVES, last=5, kills=2)


def test_a_rank_that_fails_alone_says_why_and_all_end(place: Place) -> None:
    """Though they cannot leave their process group, as NCCL's where a kernel waits for ranks that never come."""
    run = place.launch("run", fault=partial(stay_in_the_group, 3))
    assert_ended(run, Code.CURE, "error: rank 1: no room\n")


@pytest.mark.slow
def test_a_good_run_ends_though_its_group_cannot_be_left(place: Place, straight: Path) -> None:
    place.train("run", *SAVES, fault=stay_in_the_group)
    assert_same(place.folder / "run", straight)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_so_after_ten_kills(place: Place) -> None:
    """In both phases."""
    more = ["--phases.0.steps", "40", "--phases.1.steps", "20", "--checkpoints.every", "1", "--parallel.zero", "2"]
    wanted = train_straight(place, "straight", *more)
    kill_and_compare(place, wanted, more, last=55, kills=10)
