"""What was measured is compared with what was to be reached, and never more is said than was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.goals import GOALS, Goal, goal_lines
from benchmarks.gpu.parts import build_parts

AT_LEAST = Goal("part", "speed", lambda found: found.get("speed"), least=200)
AT_MOST = Goal("part", "waits", lambda found: found.get("waits"), most=0)


@pytest.mark.parametrize(
    ("goal", "value", "said"),
    [
        (AT_LEAST, 200, "met"),
        (AT_LEAST, 250.5, "met"),
        (AT_LEAST, 150, "missed by 50 (25%)"),
        (AT_MOST, 0, "met"),
        (AT_MOST, 3, "missed by 3"),
        (AT_LEAST, None, "not measured"),
        (AT_LEAST, float("nan"), "missed by nan"),
    ],
)
def test_a_figure_is_compared(goal: Goal, value: float | None, said: str) -> None:
    assert goal.judge(value, dry=False).startswith(said)
    assert goal.judge(value, dry=True) == "dry: not compared"


def test_a_figure_without_a_goal_is_told() -> None:
    assert Goal("part", "cost", lambda found: 1.5).judge(1.5, dry=False) == ""


def test_every_goal_is_one_of_a_part() -> None:
    names = {part.name for part in build_parts(Path("shards"), Path("out"), dry=False)}
    assert {goal.part for goal in GOALS} <= names


def line_of(parts: dict[str, Any], what: str) -> str:
    [line] = [line for line in goal_lines(parts, dry=False) if line.startswith(what)]
    return line


def test_the_lines_say_what_was_measured() -> None:
    contest = {
        "sides": {"cloze": {"sequences_per_second": {"median": 1845.0}, "real_pieces_per_second": {"median": 190_000}}},
        "times_as_fast_as": {"transformers": {"median": 2.25}},
    }
    parts = {
        "throughput-large-128": {"ended": "done", "measured": {"contests": {"large-128": contest}}},
        "tests": {"ended": "ran out of time", "measured": {"passed": 40, "failed": 2}},
        "throughput-large-512": {"ended": "failed"},
    }
    speed = line_of(parts, "large at 128, sequences/s")
    assert ">= 2,050" in speed
    assert "1,845" in speed
    assert "missed by 205 (10%)" in speed
    assert "2.25  met" in line_of(parts, "large at 128, times as fast as transformers")
    assert "40  met" in line_of(parts, "tests that pass")
    assert "2  missed by 2" in line_of(parts, "tests that fail")
    assert "-  not measured" in line_of(parts, "large at 512, real pieces/s")
