"""Time: runs by the clock, the time limit, and a time of day that jumps."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from support.faults import jumping_clock
from support.marks import slow
from support.training import (
    ENDLESS,
    SAVES,
    Place,
    assert_ended,
    assert_same,
    assert_well,
    launch,
    records,
    train,
)

from pretraining.checkpoint.record import finished_checkpoints
from pretraining.processes.ending import Code

pytestmark = pytest.mark.timed


@pytest.mark.parametrize("told", ["--time-limit", slow("Slurm")])
def test_the_time_limit(place: Place, told: str) -> None:
    words = ["--time-limit", "4s"] if told == "--time-limit" else []
    variables = {} if words else {"SLURM_JOB_END_TIME": str(int(time.time()) + 5)}
    going = launch(place.command("run", *ENDLESS, *words), environment=variables)
    assert_ended(going, Code.STOPPED, "stopped by the time limit after step ", "and saved")
    assert 0 < going.step < 5000
    assert finished_checkpoints(place.folder / "run")[-1].name == f"step-{going.step:08}"


def test_by_the_clock(place: Place) -> None:
    """It ends on time, and says how much is left."""
    recipe = place.folder / "clock.toml"
    recipe.write_text(
        "hours = 0.002\n"
        + place.recipe.read_text().replace("steps = 5", "share = 0.75").replace("steps = 3", "share = 0.25")
    )
    place = dataclasses.replace(place, recipe=recipe)
    output = assert_well(train(place.command("run", "--logging.every", "7")))
    lines = records(place.folder / "run")
    ends = [max(line["step"] for line in lines if line["phase"] == phase) for phase in (1, 2)]
    before = [0, *(line["step"] for line in lines[:-1])]
    trained = sum(line["seconds_per_step"] * (line["step"] - done) for line, done in zip(lines, before, strict=True))
    assert 5.0 < trained < 9.0
    left = [line["seconds_left"] for line in lines]
    assert left == sorted(left, reverse=True)
    assert left[0] == pytest.approx(7.2, abs=1.5)
    assert left[-1] < 0.5
    assert lines[-1]["learning_rate"] < 1e-4
    assert 0 < ends[0] < ends[1]
    assert "phase short (1 of 2): 5.4 s; a step: " in output
    assert "/0" not in output


def test_a_clock_that_jumps(place: Place, straight: Path) -> None:
    assert_ended(launch(place.command("run", *SAVES), fault=jumping_clock), 0)
    assert_same(place.folder / "run", straight)
    for kind, name in (("step", "seconds_per_step"), ("evaluation", "evaluation_seconds")):
        assert all(0 < line[name] < 600 for line in records(place.folder / "run", kind))


def test_a_clock_that_jumps_in_a_run_by_the_clock(place: Place) -> None:
    text = place.recipe.read_text().replace("steps = 5", "share = 0.5").replace("steps = 3", "share = 0.5")
    place = dataclasses.replace(place, recipe=place.folder / "clock.toml")
    place.recipe.write_text("hours = 0.001\n" + text)
    assert_ended(launch(place.command("run"), fault=jumping_clock), 0)
    lines = records(place.folder / "run")
    for phase in (1, 2):
        trained = sum(line["seconds_per_step"] for line in lines if line["phase"] == phase)
        assert 1.0 < trained < 60.0  # of 1.8, and what the last step takes more
    assert all(0 <= line["seconds_left"] <= 3.6 for line in lines)
