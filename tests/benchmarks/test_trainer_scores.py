"""Scores of our fine-tuning beside those of transformers' Trainer: both sides learn, and have as many seeds."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.mistakes import mistake_of

from benchmarks import trainer_scores
from benchmarks.measure import read_results
from benchmarks.texts import write_demo_task
from benchmarks.trainer_scores import OURS, THEIRS, TrainerScores, summed

COLUMNS = "index genre file year old source1 source2 sentence1 sentence2 score".split()
STSB = "".join("\t".join(row) + "\n" for row in (COLUMNS, [*"1234567", "a man", "a cat", "1.5"]))


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


def test_scores_are_summed_up() -> None:
    ours, theirs = summed({OURS: [80.0, 82.0, 84.0], THEIRS: [70.0, 73.0, 76.0]})
    assert (ours["mean"], ours["spread"], ours["from"], ours["to"]) == ("82.0", "2.0", "80.0", "84.0")
    assert theirs["mean"] == "73.0"
    assert ours["above the other"].startswith("+9.0 (")  # 82 - 73
    assert "nobody knows" in summed({OURS: [80.0], THEIRS: [70.0]})[0]["above the other"]


@pytest.mark.parametrize(("words", "told"), [(["--seeds", "1"], "at least 2"), (["--task", "stsb"], "has no classes")])
def test_mistakes_are_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    data = write_demo_task(tmp_path / "data")
    (data / "glue" / "STS-B").mkdir()
    for name in ("train", "dev"):
        (data / "glue" / "STS-B" / f"{name}.tsv").write_text(STSB)
    given = [*words, "--data", str(data)]
    assert told in mistake_of(TrainerScores, trainer_scores.measure, given, capsys)
