"""Results of several models beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetuning.compare import main


def write(folder: Path, **scores: float | None) -> str:
    """Results of tasks."""
    folder.mkdir(parents=True)
    results: dict[str, Any] = {
        name: {"metric": "accuracy", "score": score, "runs": {}} for name, score in scores.items()
    }
    (folder / "results.json").write_text(json.dumps(results))
    return str(folder)


def test_scores_stand_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "mini" / "glue", sst2=0.801, rte=0.5)
    other = write(tmp_path / "base" / "glue", sst2=0.9, cola=None)
    assert main([one, other]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["task", "metric", "mini/glue", "base/glue", "difference"],
        ["sst2", "accuracy", "80.1", "90.0", "+9.9"],
        ["rte", "accuracy", "50.0"],
        ["cola", "accuracy"],
    ]


def test_one_folder_is_a_table_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "glue", sst2=0.5)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["sst2", "accuracy", "50.0"]


def test_what_has_no_results_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: no results.json" in capsys.readouterr().err
    (tmp_path / "results.json").write_text('{"task": "sst2", "metric": "accuracy", "score": 0.5}')
    assert main([str(tmp_path)]) == 2
    assert "name the folder above it" in capsys.readouterr().err
