"""Charts beside the results of a command: they show its runs, and never fail it."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread
from support.finetuning import call, results, write_toy

from finetuning.session import charts

pytestmark = pytest.mark.usefixtures("kept_signals")


def pictures(folder: Path) -> set[str]:
    """The names of the charts of a task, each of which can be read."""
    found = sorted(folder.glob("*.png"))
    assert all(imread(path).shape[1] > 400 for path in found)
    return {path.stem for path in found}


def test_a_grid_is_drawn_beside_its_results(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    assert call("run_task", toy.command("out", "--learning-rates", "1e-3", "3e-3", "--epochs", "1")) == 0
    assert pictures(toy.folder / "out" / "toy") == {"curves", "grid", "answers_dev"}
    assert len(results(toy.folder / "out")["runs"]) == 2


def test_what_cannot_be_drawn_is_told_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no font")

    toy = write_toy(tmp_path / "toy")
    monkeypatch.setattr(charts, "curves", broken)
    monkeypatch.setattr(charts, "save", broken)
    assert call("run_task", toy.command("out")) == 0
    said = capsys.readouterr().out
    assert "curves.png: not drawn: RuntimeError: no font" in said
    assert "answers_dev.png: not drawn: RuntimeError: no font" in said
    assert results(toy.folder / "out")["score"] is not None
    assert not pictures(toy.folder / "out" / "toy")
