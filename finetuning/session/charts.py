"""Charts of fine-tuning, as PNG: how runs went, what a model confuses, and which settings were best.

Every function draws a figure, and `save` writes it. Matplotlib is loaded when the first one is drawn, so that training
does not wait for it. The colours are told apart by people who see red and green alike.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 8.0, 150  # inches, and dots an inch: to be read at 800 dots across
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#B0B0B0"
LONGEST = 24  # characters of a name
LONGEST_TITLE = 56
LETTER = 135  # letters of one point in an inch
SMALLEST = 6.5  # points of a letter that can be read
MOST_POINTS = 3000  # points that can be told apart


def curves(metrics: Mapping[str, Path], best: str | None, metric: str, title: str) -> Figure:
    """The loss over the steps and the score on dev over the epochs, as the metrics.jsonl of every run has them.

    The best run stands out from the others, which are grey; it shows every split of dev.
    """
    figure = _figure(3.6)
    left, right = figure.subplots(1, 2)
    for name in sorted(metrics, key=lambda run: run == best):  # the best comes last, on top
        records = list(_records(metrics[name]))
        color, width, above = (BLUE, 2.0, 3) if name == best else (GREY, 1.0, 2)
        steps, losses = _column(records, "step", "loss")
        left.plot(steps, losses, color=color, alpha=0.25, linewidth=0.6)
        left.plot(steps, _smooth(losses, 1 + len(losses) // 20), color=color, linewidth=width, zorder=above)
        splits = [key for record in records for key in record if key.endswith(f"/{metric}")]
        for number, split in enumerate(dict.fromkeys(splits) if name == best else splits[:1]):
            epochs, scores = _column(records, "epoch", split)
            label, style = split.removesuffix(f"/{metric}"), ("-", "--", ":")[number % 3]
            shown = {"color": color, "linewidth": width, "linestyle": style, "marker": "o", "markersize": 2 * width}
            right.plot(epochs, 100 * scores, zorder=above, label=label if name == best else None, **shown)
    left.set(xlabel="step", ylabel="loss of training")
    right.set(xlabel="epoch", ylabel=f"{metric} × 100, on dev")
    right.xaxis.get_major_locator().set_params(integer=len(right.lines) > 0 and right.get_xlim()[1] > 1.5)
    if len(right.get_legend_handles_labels()[1]) > 1:
        right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    legend = [f"blue: {best}, grey: the other runs"] if best and len(metrics) > 1 else []
    figure.suptitle("\n".join([_plain(title, LONGEST_TITLE), *legend]), fontsize=11)
    return figure


def confusion(gold: Array, predicted: Array, names: Sequence[str], title: str) -> Figure:
    """How often each class was taken for each other one: the colour is the share of the items of the class.

    Where cells are large enough they have the count and the share; beside each class stands how many items it has.
    """
    size = len(names)
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (gold, predicted), 1)
    totals = counts.sum(axis=1)
    shares = counts / np.maximum(totals, 1)[:, None]
    plain = [_plain(name) for name in names]
    font = min(10.0, 280 / size)
    longest = max(map(len, plain)) * font / LETTER  # inches
    cell = min(1.1, (WIDTH - 1.7 - longest - 8 * font / LETTER) / size)
    upright = longest > 0.9 * cell
    figure = _figure(size * cell + 0.9 + (longest if upright else 0.2))
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    digits = len(f"{counts.max():,}")
    inside = min(font, 25 * cell, 100 * cell / max(digits, 3))
    for row, column in np.ndindex(size, size) if inside >= SMALLEST else ():
        text = f"{counts[row, column]:,}" + (f"\n{100 * shares[row, column]:.0f}%" if totals[row] else "")
        color = "white" if shares[row, column] > 0.55 else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=inside)
    axes.set_xticks(range(size), plain, rotation=90 if upright else 0, fontsize=font)
    axes.set_yticks(range(size), [f"{name} ({n:,})" for name, n in zip(plain, totals, strict=True)], fontsize=font)
    axes.set(xlabel="said", ylabel="right (items)")
    figure.colorbar(image, label="share of the class", shrink=0.8)
    axes.set_title(_plain(title, LONGEST_TITLE), fontsize=11)
    return figure


def scatter(gold: Array, predicted: Array, title: str) -> Figure:
    """The scores that a model gives, against the right ones; many points become a map of how many there are."""
    figure = _figure(6.4)
    axes = figure.subplots()
    there = np.isfinite(predicted)
    both = np.concatenate([gold, predicted[there]])
    low, high = (float(both.min()), float(both.max())) if len(both) else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.5
    limits = (low - room, high + room)
    if len(gold) > MOST_POINTS:
        shown = axes.hexbin(gold[there], predicted[there], gridsize=40, bins="log", cmap="Blues", extent=2 * limits)
        figure.colorbar(shown, label="items")
    else:
        axes.scatter(gold[there], predicted[there], s=14, color=BLUE, alpha=0.35, linewidths=0)
    axes.plot(limits, limits, color=ORANGE, linewidth=1, linestyle="--", label="as they should be")
    axes.legend(frameon=False, loc="upper left")
    axes.set(xlabel="right", ylabel="said", xlim=limits, ylim=limits, aspect="equal")
    axes.grid(alpha=0.3)
    axes.set_title(_plain(title, LONGEST_TITLE), fontsize=11)
    return figure


VARIED = {"batch": "batch {}", "epochs": "{:g} epochs", "seed": "seed {}"}
"""The settings that make the rows of a grid, and how a row says them."""


def grid(runs: Mapping[str, Mapping[str, Any]], best: str | None, title: str) -> Figure:
    """The scores of all runs by learning rate, and by batch, epochs and seed where they differ.

    `runs` has the settings of each with its `score`, which is None where the run failed, and whether it is
    `degenerate`: such runs are hatched. The best one has a frame.
    """
    rates = sorted({run["learning_rate"] for run in runs.values()})
    values = {name: sorted({run[name] for run in runs.values()}) for name in VARIED}
    rows = list(product(*values.values()))
    figure = _figure(1.9 + 0.36 * len(rows))
    axes = figure.subplots()
    scored = [run["score"] for run in runs.values() if run["score"] is not None and not run.get("degenerate")]
    low, high = (min(scored), max(scored)) if scored else (0.0, 1.0)
    for name, run in runs.items():
        place = (rates.index(run["learning_rate"]), rows.index(tuple(run[key] for key in VARIED)))
        height = None if run["score"] is None else (run["score"] - low) / ((high - low) or 1)
        _cell(axes, place, run, height, name == best)
    said = [[VARIED[key].format(v) for key, v in zip(VARIED, row, strict=True) if len(values[key]) > 1] for row in rows]
    rounded = [re.sub(r"\.?0*e([+-])0?", r"e\1", f"{rate:e}") for rate in rates]
    axes.set_xticks(range(len(rates)), rounded, rotation=90 if len(rates) > 8 else 0)
    axes.set_yticks(range(len(rows)), [", ".join(parts) for parts in said])
    axes.set(xlabel="learning rate", xlim=(-0.5, len(rates) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    legend = ["framed: the best"] if best else []
    legend += ["hatched: failed, or always the same answer"] if len(scored) < len(runs) else []
    figure.suptitle("\n".join([_plain(title, LONGEST_TITLE), "; ".join(legend)]).strip(), fontsize=11)
    return figure


def _cell(axes: Axes, place: tuple[int, int], run: Mapping[str, Any], height: float | None, is_best: bool) -> None:
    """Draws one run of a grid; `height` says where its score lies between those of all, from 0 to 1."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    column, row = place
    doubtful = height is None or run.get("degenerate")
    color = "white" if doubtful or height is None else colormaps["Blues"](0.1 + 0.75 * height)
    box = Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=color)
    box.set(edgecolor=ORANGE if is_best else GREY if doubtful else "white", linewidth=3 if is_best else 1)
    box.set(hatch="///" if doubtful else None, zorder=3 if is_best else 2)
    axes.add_patch(box)
    text = "failed" if run["score"] is None else f"{100 * run['score']:.1f}"
    said = axes.text(column, row, text, ha="center", va="center", zorder=4)
    said.set(weight="bold" if is_best else "normal")
    if doubtful:
        said.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    elif height is not None and height > 0.6:
        said.set(color="white")


def save(figure: Figure, path: Path) -> None:
    """Writes a figure whole or not at all. Letters that the font lacks are boxes in it."""
    with warnings.catch_warnings(), replacing(path) as file:
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})


def _figure(height: float) -> Figure:
    """An empty figure that finds room for its labels, and belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="compressed")
    FigureCanvasAgg(figure)
    return figure


def _plain(text: str, longest: int = LONGEST) -> str:
    """A name on one line, not too long: what names have alike is often their beginning, so that the end stays too."""
    text = " ".join(text.split())
    text = text if len(text) <= longest else f"{text[: longest // 2]}…{text[-(longest // 2 - 1) :]}"
    return text.replace("$", r"\$")  # otherwise the beginning of a formula


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, from which a line may be missing its end."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _column(records: Sequence[Mapping[str, Any]], along: str, name: str) -> tuple[Array, Array]:
    """A figure of the records that have it, and where each lies."""
    pairs = [(record[along], record[name]) for record in records if record.get(name) is not None]
    found = np.array([pair for pair in pairs if math.isfinite(pair[1])], np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _smooth(values: Array, window: int) -> Array:
    """The means of so many values before each, itself included."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    means: Array = (sums[ends] - sums[begins]) / (ends - begins)
    return means
