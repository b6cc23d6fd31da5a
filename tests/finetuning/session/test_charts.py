"""Charts: what they show, that nothing in them overlaps, that they are whole files or none, and never fail a run."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.text import Text
from support.commands import run_main
from support.finetuning import call, results, write_toy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetuning.session import report
from pretraining.reporting import figures


def texts(figure: Figure) -> list[str]:
    """All that can be read in a figure."""
    figure.canvas.draw()
    found = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]
    return [text for text in found if text.strip()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """The pairs of texts that lie on one another, and those that are cut off, as 800 dots across show them."""
    figure.set_dpi(100)
    figure.canvas.draw()
    parts: list[Any] = [*figure.texts]
    for axes in figure.axes:
        parts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            inside = [tick for tick in axis.get_major_ticks() if min(limits) <= tick.get_loc() <= max(limits)]
            parts += [label for tick in inside for label in (tick.label1, tick.label2) if label.get_visible()]
    boxes = [(part.get_text(), part.get_window_extent()) for part in dict.fromkeys(parts) if part.get_text().strip()]
    pairs = [(one, other) for (one, box), (other, second) in combinations(boxes, 2) if box.overlaps(second)]
    out = [(name, "the edge") for name, box in boxes if box.x0 < -1 or box.x1 > 801 or box.y0 < -1]
    return pairs + out


def write_metrics(path: Path, steps: int, *scores: float) -> Path:
    """The log of a run, with the metrics of two splits of dev after each epoch."""
    lines = [{"kind": "step", "step": step, "epoch": step / steps, "loss": 1 / step} for step in range(1, steps + 1)]
    lines[-1]["loss"] = None  # what JSON has for a loss that is not finite
    for epoch, score in enumerate(scores, 1):
        figures = {"dev_matched/accuracy": score, "dev_mismatched/accuracy": score / 2, "dev_matched/f1": 0.0}
        lines.append({"kind": "scores", "step": steps, "epoch": float(epoch), **figures})
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "st')
    return path


def data(line: Line2D, along: str) -> list[float]:
    """Where the points of a line lie."""
    values: list[float] = np.asarray(line.get_ydata() if along == "y" else line.get_xdata()).tolist()
    return values


def test_curves_show_losses_and_the_scores_of_every_split(tmp_path: Path) -> None:
    runs = {
        "one": write_metrics(tmp_path / "one.jsonl", 100, 0.5, 0.7),
        "two": write_metrics(tmp_path / "two.jsonl", 100, 0.5, 0.6),
        "none": tmp_path / "missing.jsonl",
    }
    figure = report.draw_curves(runs, "one", "accuracy", "mnli")
    left, right = figure.axes
    blue = [line for line in right.lines if to_hex(line.get_color()).upper() == figures.BLUE]
    assert [data(line, "y") for line in blue] == [[50.0, 70.0], [25.0, 35.0]]
    assert [data(line, "x") for line in blue] == [[1.0, 2.0]] * 2
    assert {"dev_matched", "dev_mismatched", "mnli\nblue: one, grey: the other runs"} <= set(texts(figure))
    assert right.get_ylabel() == "accuracy × 100"  # of which split, the legend says
    one, two = (line for line in left.lines if data(line, "y"))
    assert data(one, "y") == data(two, "y")
    assert data(one, "y")[:2] == pytest.approx([1, (1 + 1 / 2) / 2])
    assert data(one, "y")[-1] == pytest.approx(sum(1 / step for step in range(95, 100)) / 5)
    assert overlaps(figure) == []


def test_a_chart_is_the_same_bytes_every_time_and_wide_enough(tmp_path: Path) -> None:
    runs = {"one": write_metrics(tmp_path / "one.jsonl", 100, 0.5, 0.7)}
    for name in ("one.png", "two.png"):
        figures.save(report.draw_curves(runs, "one", "accuracy", "中文"), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert imread(tmp_path / "one.png").shape[1] == figures.WIDTH * figures.DPI


def test_training_does_not_load_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # so that importing it fails
    runpy.run_path(report.__file__)


# Beside the results of a command


pytestmark = pytest.mark.usefixtures("leaves_group")


def pictures(folder: Path) -> set[str]:
    """The names of the charts of a task, each of which can be read."""
    found = sorted(folder.glob("*.png"))
    assert all(imread(path).shape[1] > 400 for path in found)
    return {path.stem for path in found}


@pytest.mark.slow
def test_charts_are_drawn_beside_results(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    shutil.copy(toy.data / "dev.tsv", toy.data / "test.tsv")  # a test split with labels is scored too
    grid = ["--learning-rates", "1e-3", "3e-3", "--epochs", "1", "--logging.tensorboard", "true"]
    assert call("run_task", toy.command("out", *grid), charts=True) == 0
    assert pictures(toy.folder / "out" / "toy") == {"curves"}
    assert len(results(toy.folder / "out")["runs"]) == 2
    events = EventAccumulator(str(toy.folder / "out" / "toy" / "lr0.001-seed1" / "tensorboard"))
    events.Reload()
    assert {tag.partition("/")[0] for tag in events.Tags()["scalars"]} == {"train", "dev", "test"}
    assert {"dev/accuracy", "test/accuracy"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_what_cannot_be_drawn_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("no font"))
    toy = write_toy(tmp_path / "toy")
    monkeypatch.setattr(report, "draw_curves", broken)
    monkeypatch.setattr(figures, "save", broken)
    said = run_main(partial(call, "run_task", charts=True), *toy.command("out"))
    assert "curves.png: not drawn: RuntimeError: no font" in said
    assert results(toy.folder / "out")["score"] is not None
    assert not pictures(toy.folder / "out" / "toy")
