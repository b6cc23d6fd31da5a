"""Scores of our fine-tuning beside those of transformers' Trainer: both sides learn, and have as many seeds."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.mistakes import mistake_of

from benchmarks import trainer_scores
from benchmarks.measure import read_results
from benchmarks.reproduction.verdicts import compare
from benchmarks.texts import write_demo_task
from benchmarks.trainer_scores import OURS, THEIRS, TrainerScores


def write_easy_task(folder: Path) -> Path:
    """A task of two classes that one word tells apart, and their lengths too."""
    place = folder / "glue" / "SST-2"
    place.mkdir(parents=True)
    rows = [f"the {'water' if number % 2 else 'man'} of {number}\t{number % 2}\n" for number in range(320)]
    for name, some in (("train", rows), ("dev", rows[:64])):
        (place / f"{name}.tsv").write_text("".join(["sentence\tlabel\n", *some]))
    return folder


@pytest.mark.slow
def test_both_sides_learn(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data, out = write_easy_task(tmp_path / "data"), tmp_path / "found.json"
    wanted = TrainerScores("sst2", data=data, seeds=2, epochs=5, learning_rate=3e-4, out=out)
    trainer_scores.measure(wanted, Console(file=io.StringIO()))
    found = read_results(out)
    ours, theirs = found["scores"][OURS], found["scores"][THEIRS]
    assert len(ours) == len(theirs) == 2
    assert min(ours + theirs) > 90
    between = compare(ours, theirs)
    assert between is None or found["rows"][0]["above the other"].startswith(f"{between.difference:+.1f}")


@pytest.mark.parametrize(("words", "told"), [(["--seeds", "1"], "at least 2"), (["--task", "stsb"], "stsb")])
def test_mistakes_are_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    given = [*words, "--data", str(write_demo_task(tmp_path / "data"))]
    assert told in mistake_of(TrainerScores, trainer_scores.measure, given, capsys)
