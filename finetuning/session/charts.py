"""Charts of fine-tuning, as PNG files beside results.json: training curves and confusions.

A chart that cannot be drawn is reported, and fails nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.common.arrays import Array
from finetuning.results import PREDICTIONS, TaskResult
from finetuning.tasks.task import Task
from pretraining.reporting.figures import BLUE, GREY, WIDTH, draw, new_figure, smooth
from pretraining.reporting.metrics_file import METRICS, read_all_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST, LONGEST_TITLE = 24, 56
"""Characters of a name and of a title."""
LETTER = 135
"""Letters of one point to the inch."""
SMALLEST = 6.5
"""Points of the smallest letter that can be read."""


def draw_curves(metrics: Mapping[str, Path], best: str | None, metric: str, title: str) -> Figure:
    """Draws the loss by step and the score by epoch of all runs, from their metrics.jsonl; the best run in colour and
    with every split."""
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2)
    for name in sorted(metrics, key=lambda run: run == best):  # the best comes last, on top
        records = list(read_all_records(metrics[name]))
        color, width, above = (BLUE, 2.0, 3) if name == best else (GREY, 1.0, 2)
        steps, losses = _read_column(records, "step", "loss")
        left.plot(steps, losses, color=color, alpha=0.25, linewidth=0.6)
        left.plot(steps, smooth(losses, 1 + len(losses) // 20), color=color, linewidth=width, zorder=above)
        scored = [key for record in records for key in record if key.endswith(f"/{metric}")]
        for split, style in zip(dict.fromkeys(scored) if name == best else scored[:1], ("-", "--", ":"), strict=False):
            epochs, scores = _read_column(records, "epoch", split)
            label = split.removesuffix(f"/{metric}") if name == best else None
            line = {"color": color, "linewidth": width, "linestyle": style, "marker": "o", "markersize": 2 * width}
            right.plot(epochs, 100 * scores, zorder=above, label=label, **line)
    left.set(xlabel="step", ylabel="loss of training")
    right.set(xlabel="epoch", ylabel=f"{metric} × 100")
    if right.get_legend_handles_labels()[1]:
        right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    _set_title(figure, title, f"blue: {best}, grey: the other runs" if best and len(metrics) > 1 else "")
    return figure


def draw_confusion(right: Array, said: Array, names: Sequence[str], title: str) -> Figure:
    """Draws how often each class was taken for each other one; the colour is the share of the items of a class.

    Cells that are large enough show the count and the share.
    """
    size = len(names)
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (right, said), 1)
    totals = counts.sum(axis=1)
    shares = counts / np.maximum(totals, 1)[:, None]
    plain = [_shorten(name) for name in names]
    font = min(10.0, 280 / size)
    longest = max(map(len, plain)) * font / LETTER  # inches
    cell = min(1.1, (WIDTH - 1.7 - longest - 8 * font / LETTER) / size)
    upright = longest > 0.9 * cell
    figure = new_figure(size * cell + 0.9 + (longest if upright else 0.2))
    _set_title(figure, title)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    inside = min(font, 25 * cell, 100 * cell / max(len(f"{counts.max():,}"), 3))
    for row, column in np.ndindex(size, size) if inside >= SMALLEST else ():
        text = f"{counts[row, column]:,}" + (f"\n{100 * shares[row, column]:.0f}%" if totals[row] else "")
        color = "white" if shares[row, column] > 0.55 else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=inside)
    axes.set_xticks(range(size), plain, rotation=90 if upright else 0, fontsize=font)
    axes.set_yticks(range(size), [f"{name} ({n:,})" for name, n in zip(plain, totals, strict=True)], fontsize=font)
    axes.set(xlabel="said", ylabel="right (items)")
    figure.colorbar(image, label="share of the class", shrink=0.8)
    return figure


def _set_title(figure: Figure, title: str, legend: str = "") -> None:
    """Writes a title, and what the colours mean below it."""
    figure.suptitle(f"{_shorten(title, LONGEST_TITLE)}\n{legend}".strip(), fontsize=11)


def _shorten(text: str, longest: int = LONGEST) -> str:
    """Puts a name on one line and leaves out its middle where it is long: similar names often begin alike."""
    text = " ".join(text.split())
    text = text if len(text) <= longest else f"{text[: longest // 2]}…{text[-(longest // 2 - 1) :]}"
    return text.replace("$", r"\$")  # otherwise the beginning of a formula


def _read_column(records: Sequence[Mapping[str, Any]], along: str, name: str) -> tuple[Array, Array]:
    """Returns the finite values of a figure in the records that have it, and their places along the axis."""
    pairs = [(record[along], record[name]) for record in records if record.get(name) is not None]
    found = np.array([pair for pair in pairs if math.isfinite(pair[1])], np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def draw_task(task: Task, folder: Path, result: TaskResult) -> list[str]:
    """Draws the charts of a task; returns a line for each that could not be drawn."""
    metrics = {name: path for name in result.runs if (path := folder / name / METRICS).exists()}
    curves = partial(draw_curves, metrics, result.best, result.metric, task.name)
    failed = draw(folder / "curves.png", curves) if metrics else []
    for split in task.dev if result.best is not None else ():
        failed += draw(folder / f"answers_{split}.png", partial(_draw_answers, task, folder / PREDICTIONS, split))
    return failed


def _draw_answers(task: Task, predictions: Path, split: str) -> Figure | None:
    """Draws the answers of the best run against the right ones; None for a task without classes."""
    compared = task.read_compared(split, predictions)
    if compared is None:
        return None
    return draw_confusion(compared.right, compared.said, compared.names, f"{task.name}, {split}")
