"""Signals: SIGTERM and SIGUSR1 save and stop, Ctrl-C ends at once."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest
from support.faults import slow_save, slow_start
from support.marks import slow
from support.processes import wait_for
from support.training import (
    LONG,
    SAVES,
    STOPPED,
    Place,
    assert_ended,
    assert_same,
    assert_well,
    contents,
    launch,
    stopped_at,
    train,
)

from pretraining.checkpoint.record import FOLDER, finished_checkpoints
from pretraining.processes.group import INTERRUPTED


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), slow(signal.SIGUSR1, 0)])
def test_a_signal_to_one_rank_stops_all_in_good_order(place: Place, long: Path, number: int, rank: int) -> None:
    going = launch(place.command("run", *LONG))
    going.reach(3)
    going.signal(number, rank)
    errors = assert_ended(going, STOPPED)
    assert errors == (
        f"stopped by a signal after step {going.step}, and saved; the same command continues from there\n"
    )
    assert finished_checkpoints(place.folder / "run")[-1].name == f"step-{going.step:08}"
    assert f"continues after step {going.step}\n" in assert_well(train(place.command("run", *LONG)))
    assert_same(place.folder / "run", long)


def test_more_signals_during_the_save_change_nothing(place: Place, long: Path) -> None:
    command = place.command("run", *LONG, "--checkpoints.every", "0")
    going = launch(command, fault=partial(slow_save, 0.3))
    going.reach(3)
    going.signal(signal.SIGTERM)
    wait_for(lambda: any((place.folder / "run" / FOLDER).glob("*.tmp")))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        going.signal(number)
        time.sleep(0.05)
    assert_ended(going, STOPPED, f"stopped by a signal after step {going.step}, and saved")
    assert finished_checkpoints(place.folder / "run")[-1].name == f"step-{going.step:08}"
    assert_ended(launch(command), 0)
    assert_same(place.folder / "run", long)


@pytest.mark.parametrize("come", [1, 2])
def test_a_run_that_is_stopped_while_it_starts(place: Place, straight: Path, come: int) -> None:
    """While rank 0 waits for the others to come, at once; while they make the model, after a first step."""
    run = stopped_at(straight, place.folder / "run", 6)
    before = {path: contents(path) for path in finished_checkpoints(run)}
    (run / "lock").unlink()
    going = launch(place.command("run", *SAVES), fault=slow_start, come=come)
    if come == 2:
        wait_for((run / "lock").exists)
    time.sleep(0.5)
    going.signal(signal.SIGTERM)
    message = INTERRUPTED if come == 1 else "stopped by a signal after step 7, and saved; the same command continues"
    assert assert_ended(going, STOPPED).strip().startswith(message)
    assert {path: contents(path) for path in before} == before
    assert_ended(launch(place.command("run", *SAVES)), 0)
    assert_same(run, straight)


@pytest.mark.parametrize("ranks", [2, slow(1)])
def test_an_interrupted_run_ends_at_once_and_quietly(place: Place, ranks: int) -> None:
    going = launch(place.command("run", "--phases.0.steps", "5000"), ranks)
    going.reach(4)
    going.signal(signal.SIGINT)
    going.wait(15)
    assert assert_ended(going, 130).strip() == INTERRUPTED
