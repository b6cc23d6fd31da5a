"""Charts beside the results of a command: they show its runs, and never fail it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from matplotlib.image import imread
from support.finetuning import call, results, write_toy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetuning.session import charts
from pretraining.reporting import figures

pytestmark = pytest.mark.usefixtures("leaves_group")


def pictures(folder: Path) -> set[str]:
    """The names of the charts of a task, each of which can be read."""
    found = sorted(folder.glob("*.png"))
    assert all(imread(path).shape[1] > 400 for path in found)
    return {path.stem for path in found}


def test_a_grid_is_drawn_beside_its_results(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    shutil.copy(toy.data / "dev.tsv", toy.data / "test.tsv")  # a test split with labels is scored too
    grid = ["--learning-rates", "1e-3", "3e-3", "--epochs", "1", "--logging.tensorboard", "true", "--length", "16"]
    assert call("run_task", toy.command("out", *grid), charts=True) == 0
    drawn = {"curves", "grid", "lengths", "answers_dev", "answers_test", "classes_dev", "classes_test"}
    assert pictures(toy.folder / "out" / "toy") == drawn
    assert len(results(toy.folder / "out")["runs"]) == 2
    events = EventAccumulator(str(toy.folder / "out" / "toy" / "lr0.001-seed1" / "tensorboard"))
    events.Reload()
    assert {tag.partition("/")[0] for tag in events.Tags()["scalars"]} == {"train", "dev", "test"}
    assert {"dev/accuracy", "test/accuracy"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_what_cannot_be_drawn_is_told_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no font")

    toy = write_toy(tmp_path / "toy")
    monkeypatch.setattr(charts, "draw_curves", broken)
    monkeypatch.setattr(figures, "save", broken)
    assert call("run_task", toy.command("out"), charts=True) == 0
    said = capsys.readouterr().out
    assert "curves.png: not drawn: RuntimeError: no font" in said
    assert "answers_dev.png: not drawn: RuntimeError: no font" in said
    assert results(toy.folder / "out")["score"] is not None
    assert not pictures(toy.folder / "out" / "toy")
