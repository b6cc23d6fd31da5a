"""The benchmark of fine-tuning over ranks: launches take turns, and the numbers are kept."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.mistakes import mistake_of

from benchmarks import fine_tuning_ranks
from benchmarks.fine_tuning_ranks import RankSpeed
from benchmarks.measure import read_results


@pytest.mark.slow
def test_ranks_take_turns_on_the_demo_corpus(tmp_path: Path) -> None:
    said = io.StringIO()
    settings = RankSpeed(size="tiny", steps=2, rounds=1, data=tmp_path / "none", out=tmp_path / "found.json")
    fine_tuning_ranks.measure(settings, Console(file=said, width=200))
    found = read_results(tmp_path / "found.json")
    assert found["task"] == "demo"
    assert [row["ranks x threads"] for row in found["rows"]] == ["1 x 1", "2 x 1", "1 x 2"]
    first, second, _ = found["rows"]
    assert first["times"]["median"] == first["times the items"]["median"] == 1
    slowed = second["seconds a step"]["median"] / first["seconds a step"]["median"]
    assert second["times"]["median"] == pytest.approx(1 / slowed, rel=0.02)
    slowed = second["seconds a step of as many items a rank"]["median"]
    slowed /= first["seconds a step of as many items a rank"]["median"]
    assert second["times the items"]["median"] == pytest.approx(2 / slowed, rel=0.02)
    assert "2 x 1" in said.getvalue()


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--ranks", "0"], ["--size", "huge"]], ids=" ".join)
def test_mistakes_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "from 1 on" in mistake_of(RankSpeed, fine_tuning_ranks.measure, words, capsys)
