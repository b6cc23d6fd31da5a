"""Runs whose ranks are killed: the others end by themselves, and the same command ends where the straight run ends."""

from __future__ import annotations

import random
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from support.faults import slow_save
from support.marks import slow
from support.processes import wait_for
from support.training import (
    LONG,
    Place,
    assert_same,
    assert_same_curve,
    assert_well,
    distance,
    launch,
    records,
    train,
    train_straight,
)

from pretraining.checkpoint.record import FOLDER, RECORD, list_finished
from pretraining.processes.ending import Code


def kill(command: list[str], checkpoints: Path, step: int, draw: random.Random, save: bool) -> None:
    """Kills a rank at a random moment after a step, or inside a save; the other must end by itself."""
    run = launch(command, fault=partial(slow_save, 0.05) if save else None)
    run.reach(step)
    if save:
        wait_for(lambda: any(not (folder / RECORD).exists() for folder in checkpoints.glob("*.tmp")))
    else:
        time.sleep(draw.uniform(0, 0.05))
    victim = draw.randrange(2)
    run.signal(signal.SIGKILL, victim)
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


def test_a_run_whose_ranks_are_killed_is_the_straight_one(place: Place, long: Path) -> None:
    kill_and_compare(place, long, LONG, last=18, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_so_after_thirty_kills(place: Place) -> None:
    more = ["--phases.0.steps", "150", "--phases.1.steps", "50", "--checkpoints.every", "1", "--parallel.zero", "2"]
    wanted = train_straight(place, "straight", *more)
    kill_and_compare(place, wanted, more, last=180, kills=30)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [slow(1), 2])
def test_a_run_that_was_killed_goes_on_with_the_same_batches(place: Place, ranks: int) -> None:
    longer = ["--phases.0.steps", "30", "--checkpoints.every", "2", "--parallel.zero", "2"]
    killed, straight = (place.folder / name for name in ("killed", "straight"))
    run = launch(place.command(killed, *longer), ranks)
    wait_for(lambda: len(list_finished(killed)) > 1)
    run.signal(signal.SIGKILL)
    assert {rank.code for rank in run.wait(10)} == {-signal.SIGKILL}
    stopped = int(list_finished(killed)[-1].name.removeprefix("step-"))
    assert stopped < 30, "it was done before it was killed"
    assert f"continues after step {stopped}" in assert_well(train(place.command(killed, *longer), ranks))
    assert_well(train(place.command(straight, *longer, "--checkpoints.every", "0"), ranks))
    assert [record["step"] for record in records(killed)] == list(range(1, 34))
    assert_same_curve(killed, straight, 1e-9 if ranks == 1 else 1e-6)
    assert distance(killed, straight) < 1e-6
