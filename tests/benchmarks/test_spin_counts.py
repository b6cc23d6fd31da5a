"""The benchmark of how long threads wait: all counts take turns, alone and beside another program."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.mistakes import mistake_of

from benchmarks import spin_counts
from benchmarks.measure import read_results
from benchmarks.spin_counts import SpinCounts


@pytest.mark.slow
def test_counts_take_turns_on_the_demo_corpus(tmp_path: Path) -> None:
    said = io.StringIO()
    words = {"size": "tiny", "steps": 2, "rounds": 1, "data": tmp_path / "none", "out": tmp_path / "found.json"}
    spin_counts.measure(SpinCounts(counts=(2000, 5000), **words), Console(file=said, width=200))  # type: ignore[arg-type]
    found = read_results(tmp_path / "found.json")
    first, last = found["rows"]
    assert [first["looks"], last["looks"]] == ["2,000", "5,000"]
    slowed = first["seconds a step"]["median"] / last["seconds a step"]["median"]
    assert first["times the last"]["median"] == pytest.approx(slowed, rel=0.05)
    assert "beside another program" in said.getvalue()


@pytest.mark.parametrize("beside", [False, True])
def test_a_process_has_its_count_and_its_neighbour(
    beside: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    me, notes = psutil.Process(), tmp_path / "notes"
    before = {child.pid for child in me.children()}

    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        neighbours = {child.pid for child in me.children()} - before
        notes.write_text(f"7.0\n{env['GOMP_SPINCOUNT']}.{len(neighbours)}\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", run)
    assert spin_counts.seconds_of_a_step(2000, beside, [], notes) == (2000.1 if beside else 2000.0)
    assert {child.pid for child in me.children()} == before


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--counts", "0"], ["--size", "huge"]], ids=" ".join)
def test_mistakes_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "from 1 on" in mistake_of(SpinCounts, spin_counts.measure, words, capsys)
