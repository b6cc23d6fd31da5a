"""What was measured is compared with what was to be reached, and never more is said than was measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.parts import Goal, format_goals

AT_LEAST = Goal(what="speed", figure="speed", least=200)
AT_MOST = Goal(what="waits", figure="waits", most=0)
WITHOUT = Goal(what="cost", figure="cost")


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
        (WITHOUT, 1.5, ""),
    ],
)
def test_a_figure_is_compared(goal: Goal, value: float | None, said: str) -> None:
    assert goal.judge(value, dry=False).removesuffix(" (nan%)") == said
    assert goal.judge(value, dry=True) == ("dry: not compared" if said else "")


def line_of(parts: dict[str, Any], what: str) -> str:
    [line] = [line for line in format_goals(parts, dry=False) if line.startswith(what)]
    return line


def contest(pieces: float, **more: Any) -> dict[str, Any]:
    """A contest in which we made so many pieces a second, twice as many as transformers."""
    names = ("real_pieces_per_second", "sequences_per_second", "share_of_ceiling", "seconds_a_step")
    ours = {name: {"median": pieces} for name in names}
    ratios = {"transformers, compiled": {"median": 2.0}, "cloze, compiled": {"median": 0.9}}
    usual = {"mean_length": 110.0, "vocabulary": 30_522, "times_as_fast_as": ratios, "sides": {"cloze": ours}}
    return {"measured": {"contests": {"large-128": {**usual, **more}}}}


def test_the_lines_say_what_was_measured() -> None:
    parts = {
        "large-128": contest(204_000),
        "peer-128": contest(0),
        "tests-kernels": {"ended": "ran out of time", "measured": {"passed": 40, "failed": 2}},
        "large-512": {"ended": "failed"},
        "inference": {"measured": {"models": {"base": {"1 x 384": {"sides": {"cloze bf16": {"p50_ms": 1.9}}}}}}},
    }
    for what, told in {
        "large at 128, real pieces/s": ">= 255,000      204,000  missed by 5.1e+04 (20%)",
        "large at 128, transformers compiled: times": "2  met",
        "tests of kernels that pass": "40  met",
        "tests of kernels that fail": "2  missed by 2",
        "large at 512, real pieces/s": "-  not measured",
        "base, 1 x 384: milliseconds": "1.9  met",
    }.items():
        assert told in line_of(parts, what)
    for what in ("large at 128, transformers: times", "base, 1 x 128: milliseconds"):
        assert line_of(parts, what).split()[-1] == "-"


def test_what_was_easier_than_meant_is_told() -> None:
    line = line_of({"large-128": contest(300_000, mean_length=40.0, vocabulary=8192)}, "large at 128, real pieces/s")
    assert "met; sequences have 40 pieces, not 100; the vocabulary has 8,192, not 30,522" in line
    assert "vocabulary" not in line_of({"large-128": contest(300_000)}, "large at 128, real pieces/s")
