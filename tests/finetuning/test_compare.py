"""Results of several models beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetuning.compare import main


def write(folder: Path, runs: int = 1, dev: str = "200 rows, checksum 12", **scores: float | None) -> str:
    """Results of tasks."""
    folder.mkdir(parents=True)
    results: dict[str, Any] = {
        name: {
            "metric": "accuracy",
            "score": score,
            "scores": {} if score is None else {"dev": {"accuracy": score}},
            "spreads": {"dev": {"accuracy": 0.02}},
            "data": {"train": "9 rows, checksum 34", "dev": dev},
            "runs": {f"seed{number}": {"score": score} for number in range(runs)},
        }
        for name, score in scores.items()
    }
    (folder / "results.json").write_text(json.dumps(results))
    return str(folder)


def rows_of(said: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines()]


def test_scores_stand_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "mini" / "glue", sst2=0.801, rte=0.5, mrpc=0.9)
    other = write(tmp_path / "base" / "glue", sst2=0.9, cola=None, mrpc=0.905)
    assert main([one, other]) == 0
    assert rows_of(capsys.readouterr().out) == [
        ["task", "metric", "mini/glue", "base/glue", "difference", "by", "chance"],
        ["sst2", "accuracy", "80.1", "90.0", "+9.9", "±", "2.8"],
        ["rte", "accuracy", "50.0"],
        ["mrpc", "accuracy", "90.0", "90.5", "+0.5", "±", "2.8,", "within", "it"],
        ["cola", "accuracy"],
    ]


@pytest.mark.parametrize(
    ("unlike", "named"),
    [({"runs": 5}, "the best of 5 runs"), ({"dev": "180 rows, checksum 56"}, "other items in dev (200 rows")],
)
def test_what_is_not_alike_has_no_difference(
    unlike: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path / "a", sst2=0.8), write(tmp_path / "b", sst2=0.9, **unlike)]) == 0
    _, row, note = capsys.readouterr().out.splitlines()
    assert row.split() == ["sst2", "accuracy", "80.0", "90.0"]
    assert note.startswith("sst2: not alike")
    assert named in note


def test_what_has_no_results_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: no results.json" in capsys.readouterr().err
    (tmp_path / "results.json").write_text('{"task": "sst2", "metric": "accuracy", "score": 0.5}')
    assert main([str(tmp_path)]) == 2
    assert "name the folder above it" in capsys.readouterr().err
    assert main([]) == 2
    assert "python finetuning/compare.py runs/" in capsys.readouterr().err


def test_damaged_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(write(tmp_path / "a", sst2=0.8)) / "results.json"
    whole = json.loads(path.read_text())
    wrong: list[Any] = [
        {"score": "x"},
        {"score": float("nan")},
        {"runs": []},
        {"spreads": []},
        {"spreads": {"dev": {"accuracy": "x"}}},
        {"scores": {"dev": 1}},
    ]
    contents: list[Any] = [[], "x", None, {}, *({"sst2": {**whole["sst2"], **each}} for each in wrong)]
    for content in contents:
        path.write_text(json.dumps(content))
        assert main([str(tmp_path / "a")]) == 2
        assert f"{path}: no results of a command of finetuning/, or damaged" in capsys.readouterr().err


def test_names_are_shown_as_they_are_and_files_lead_to_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [write(tmp_path / name, runs=runs, sst2=0.8) for name, runs in (("a", 1), ("[bold]b", 1), ("c", 2))]
    assert main(names[:1]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["sst2", "accuracy", "80.0"]
    assert main([f"{names[0]}/results.json", *names[1:]]) == 0
    head, _, note = capsys.readouterr().out.splitlines()
    assert "[bold]b" in head
    assert note.startswith("sst2: not alike (c): one run and the best of 2")
