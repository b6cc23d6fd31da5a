"""Time: runs by the clock, the time limit, and a time of day that jumps."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from support.faults import jumping_clock, slow_steps
from support.training import ENDLESS, SAVES, Place, assert_ended, assert_same, launch, records

from pretraining.checkpoint.record import list_finished
from pretraining.processes.ending import Code

pytestmark = pytest.mark.timed


def test_the_time_limit(place: Place) -> None:
    """That of Slurm's job is found in tests/pretraining/processes/test_stopping.py."""
    going = place.launch("run", *ENDLESS, "--time-limit", "4s")
    assert_ended(going, Code.STOPPED, "stopped by the time limit after step ", "and saved")
    assert 0 < going.step < 5000
    assert list_finished(place.folder / "run")[-1].name == f"step-{going.step:08}"


def by_the_clock(place: Place, hours: float, *shares: float) -> Place:
    """The place with a recipe whose two phases have these shares of the hours."""
    text = f"hours = {hours}\n" + place.recipe.read_text()
    for steps, share in zip((5, 3), shares, strict=True):
        text = text.replace(f"steps = {steps}", f"share = {share}")
    recipe = place.folder / "clock.toml"
    recipe.write_text(text)
    return dataclasses.replace(place, recipe=recipe)


def seconds_of(lines: list[dict[str, float]], phase: int) -> float:
    """The seconds that the steps of a phase took, by the lines of the log."""
    before = [0, *(line["step"] for line in lines[:-1])]
    each = zip(lines, before, strict=True)
    return sum(line["seconds_per_step"] * (line["step"] - done) for line, done in each if line["phase"] == phase)


@pytest.mark.slow
def test_by_the_clock(place: Place) -> None:
    """It ends on time, and says how much is left."""
    place = by_the_clock(place, 0.002, 0.75, 0.25)
    output = place.train("run", "--logging.every", "7")
    lines = records(place.folder / "run")
    ends = [max(line["step"] for line in lines if line["phase"] == phase) for phase in (1, 2)]
    first, second = (seconds_of(lines, phase) for phase in (1, 2))
    assert first > 5.35
    assert second > 1.75
    assert first + second < 9.0
    left = [line["seconds_left"] for line in lines]
    assert (left, left[0]) == (sorted(left, reverse=True), pytest.approx(7.2, abs=1.5))
    assert left[-1] < 0.5
    assert lines[-1]["learning_rate"] < 1e-4
    assert 0 < ends[0] < ends[1]
    assert "phase short (1 of 2): 5.4 s; a step: " in output
    assert "/0" not in output


def test_slow_steps_end_no_phase_early(place: Place) -> None:
    """Those that follow are thought to be as slow, until all look at the clock."""
    place = by_the_clock(place, 0.001, 0.5, 0.5)
    command = place.command("run", "--logging.every", "7")
    assert_ended(launch(command, fault=partial(slow_steps, last=7, seconds=0.15)), 0)
    lines = records(place.folder / "run")
    assert seconds_of(lines, 1) > 1.75
    assert [line["seconds_left"] for line in lines if line["phase"] == 1][-1] == pytest.approx(1.8)


def test_a_clock_that_jumps(place: Place, straight: Path) -> None:
    assert_ended(place.launch("run", *SAVES, fault=jumping_clock), 0)
    assert_same(place.folder / "run", straight)
    for kind, name in (("step", "seconds_per_step"), ("evaluation", "evaluation_seconds")):
        assert all(0 < line[name] < 600 for line in records(place.folder / "run", kind))


@pytest.mark.slow
def test_a_clock_that_jumps_in_a_run_by_the_clock(place: Place) -> None:
    place = by_the_clock(place, 0.001, 0.5, 0.5)
    assert_ended(place.launch("run", fault=jumping_clock), 0)
    lines = records(place.folder / "run")
    assert all(1.0 < seconds_of(lines, phase) < 60.0 for phase in (1, 2))  # of 1.8, and what the last step takes more
    assert all(0 <= line["seconds_left"] <= 3.6 for line in lines)
