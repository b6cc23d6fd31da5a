"""Charts of fine-tuning, as PNG beside results.json: how runs went, what a model confuses, which settings were best.

What cannot be drawn is told, and stops nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.common.arrays import Array
from finetuning.results import PREDICTIONS, ClassFigures, RunResult, TaskResult
from finetuning.session.look import Measured, measure
from finetuning.tasks.scores import wilson
from finetuning.tasks.task import Task
from pretraining.reporting.figures import BLUE, GREY, ORANGE, WIDTH, draw, new_figure, smooth
from pretraining.reporting.metrics_file import METRICS, read_all_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST = 24  # characters of a name
LONGEST_TITLE = 56
LETTER = 135  # letters of one point in an inch
SMALLEST = 6.5  # points of a letter that can be read
MOST_POINTS = 3000  # points that can be told apart


def curves(metrics: Mapping[str, Path], best: str | None, metric: str, title: str) -> Figure:
    """The loss over the steps and the scores over the epochs, as the metrics.jsonl of every run has them.

    The best run stands out from the others, which are grey; it shows every split that is scored.
    """
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2)
    for name in sorted(metrics, key=lambda run: run == best):  # the best comes last, on top
        records = list(read_all_records(metrics[name]))
        color, width, above = (BLUE, 2.0, 3) if name == best else (GREY, 1.0, 2)
        steps, losses = _column(records, "step", "loss")
        left.plot(steps, losses, color=color, alpha=0.25, linewidth=0.6)
        left.plot(steps, smooth(losses, 1 + len(losses) // 20), color=color, linewidth=width, zorder=above)
        scored = [key for record in records for key in record if key.endswith(f"/{metric}")]
        for number, split in enumerate(dict.fromkeys(scored) if name == best else scored[:1]):
            epochs, scores = _column(records, "epoch", split)
            label, style = split.removesuffix(f"/{metric}"), ("-", "--", ":")[number % 3]
            shown = {"color": color, "linewidth": width, "linestyle": style, "marker": "o", "markersize": 2 * width}
            right.plot(epochs, 100 * scores, zorder=above, label=label if name == best else None, **shown)
    left.set(xlabel="step", ylabel="loss of training")
    splits = right.get_legend_handles_labels()[1]
    right.set(xlabel="epoch", ylabel=f"{metric} × 100" + (f", on {splits[0]}" if len(splits) == 1 else ""))
    right.xaxis.get_major_locator().set_params(integer=len(right.lines) > 0 and right.get_xlim()[1] > 1.5)
    if len(splits) > 1:
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
    figure = new_figure(size * cell + 0.9 + (longest if upright else 0.2))
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
    figure = new_figure(6.4)
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


BARS = 60
"""Bars of a picture of lengths, about."""
MOST_CLASSES = 40
"""Classes that are drawn; of more, those with the lowest recall."""


def by_class(classes: Mapping[str, ClassFigures], title: str) -> Figure:
    """Recall and precision of every class, as results.json has them, with the interval that so many items leave."""
    names = [*classes]
    recall, precision, items, said = (
        np.array([found[figure] or 0.0 for found in classes.values()], np.float64)
        for figure in ("recall", "precision", "items", "said")
    )
    bars = (
        ("recall: found of those that are", recall, items, BLUE, 1),
        ("precision: right of those said to be", precision, said, ORANGE, -1),
    )
    asked = np.where(items > 0, recall, np.inf)  # of those without items nothing is known
    order = np.sort(np.argsort(asked, kind="stable")[:MOST_CLASSES])[::-1]
    figure = new_figure(1.3 + 0.44 * len(order))
    axes = figure.subplots()
    for label, figures, totals, color, side in bars:
        shares, among, places = figures[order], totals[order], np.arange(len(order)) + 0.2 * side
        low, high = wilson(shares * among, among)
        reach = 100 * np.stack([np.maximum(shares - low, 0), np.maximum(high - shares, 0)]) * (among > 0)
        axes.barh(places, 100 * shares, 0.36, color=color, alpha=0.8, label=label)
        axes.errorbar(100 * shares, places, xerr=reach, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        for place, share, number, end in zip(places, shares, among, 100 * shares + reach[1], strict=True):
            text = f"{100 * share:.1f}% of {number:,.0f}" if number else "none"
            axes.text(end + 1.2, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(order)), [_plain(names[number]) for number in order])
    axes.set(xlim=(0, 122), ylim=(-0.6, len(order) - 0.4), xlabel="% (lines: 95% intervals of so many items)")
    axes.set_xticks(range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["bottom"].set_bounds(0, 100)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    few = f"\nthe {len(order)} of {len(names)} classes of which least is found" * (len(order) < len(names))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.set_title(_plain(title, LONGEST_TITLE) + few, fontsize=11)
    return figure


def lengths(measured: Sequence[Measured], title: str) -> Figure:
    """How many pieces the items have, with where they are cut, or read in parts."""
    figure = new_figure(0.5 + 2.5 * len(measured))
    for axes, each in zip(figure.subplots(len(measured), 1, squeeze=False)[:, 0], measured, strict=True):
        limit, pieces = each.lengths.limit, each.pieces
        reach = max(limit * 1.15, float(np.quantile(pieces, 0.995)) * 1.05)
        step = math.ceil(reach / BARS)
        edges = 0.5 + np.arange(limit % step - step, reach + step, step)  # one of them at the limit
        reach, over = float(edges[-1]), pieces > limit
        shown = [np.minimum(part, reach) for part in (pieces[~over], pieces[over])]
        axes.hist(shown, edges, stacked=True, color=[BLUE, ORANGE])
        axes.axvline(limit, color="black", linewidth=1.2, linestyle="--")
        fate = "cut off there" if each.lengths.cuts else "read in parts"
        told = (
            f"{100 * over.mean():.1f}% are {fate}\nthe longest has {pieces.max():,}" if over.any() else "none is longer"
        )
        longer = f" (the last bar: {edges[-2]:,.0f} and more)" * bool(pieces.max() > reach)
        on_left = limit > 0.6 * reach
        place = {"xytext": (-6 if on_left else 6, -4), "textcoords": "offset points", "va": "top"}
        axes.annotate(
            f"{each.lengths.setting} = {limit}: {told}",
            (limit, 1),
            xycoords=("data", "axes fraction"),
            ha="right" if on_left else "left",
            **place,
        )
        axes.set(
            xlabel=f"pieces of {each.lengths.what}" + longer, ylabel="a sample of items" if each.is_sample else "items"
        )
        axes.set_xlim(0, reach)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    figure.suptitle(_plain(title, LONGEST_TITLE), fontsize=11)
    return figure


VARIED = {"batch": "batch {}", "epochs": "{:g} epochs", "seed": "seed {}"}
"""The settings that make the rows of a grid, and how a row says them."""


def grid(runs: Mapping[str, RunResult], best: str | None, title: str, items: int) -> Figure:
    """The scores of all runs by learning rate, and by batch, epochs and seed where they differ.

    The colours reach as far as scores on so many items differ by chance, or farther: what may be one is alike.
    Runs that failed, or whose model says the same of every item, are hatched. The best one has a frame.
    """
    rates = sorted({run.settings["learning_rate"] for run in runs.values()})
    values = {name: sorted({run.settings[name] for run in runs.values()}) for name in VARIED}
    rows = list(product(*values.values()))
    figure = new_figure(1.9 + 0.36 * len(rows))
    axes = figure.subplots()
    scored = [run.score for run in runs.values() if run.score is not None and not run.degenerate]
    high = max(scored, default=1.0)
    least, most = wilson(np.clip(high, 0.0, 1.0) * items, items)
    low = min([*scored, high - float(most - least)])
    for name, run in runs.items():
        place = (rates.index(run.settings["learning_rate"]), rows.index(tuple(run.settings[key] for key in VARIED)))
        height = None if run.score is None else (run.score - low) / (high - low)
        _cell(axes, place, run, height, name == best)
    said = [[VARIED[key].format(v) for key, v in zip(VARIED, row, strict=True) if len(values[key]) > 1] for row in rows]
    rounded = [re.sub(r"\.?0*e([+-])0?", r"e\1", f"{rate:e}") for rate in rates]
    axes.set_xticks(range(len(rates)), rounded, rotation=90 if len(rates) > 8 else 0)
    axes.set_yticks(range(len(rows)), [", ".join(parts) for parts in said])
    axes.set(xlabel="learning rate", xlim=(-0.5, len(rates) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    legend = ["framed: the best"] if best else []
    legend += [f"palest: {100 * (high - low):.1f} below the best"] if len(scored) > 1 else []
    legend += ["hatched: failed, or always the same answer"] if len(scored) < len(runs) else []
    figure.suptitle("\n".join([_plain(title, LONGEST_TITLE), "; ".join(legend)]).strip(), fontsize=11)
    return figure


def _cell(axes: Axes, place: tuple[int, int], run: RunResult, height: float | None, is_best: bool) -> None:
    """Draws one run of a grid; `height` says where its score lies between those of all, from 0 to 1."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    column, row = place
    doubtful = height is None or run.degenerate
    color = "white" if doubtful or height is None else colormaps["Blues"](0.1 + 0.75 * height)
    box = Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=color)
    box.set(edgecolor=ORANGE if is_best else GREY if doubtful else "white", linewidth=3 if is_best else 1)
    box.set(hatch="///" if doubtful else None, zorder=3 if is_best else 2)
    axes.add_patch(box)
    text = "failed" if run.score is None else f"{100 * run.score:.1f}"
    said = axes.text(column, row, text, ha="center", va="center", zorder=4)
    said.set(weight="bold" if is_best else "normal")
    if doubtful:
        said.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    elif height is not None and height > 0.6:
        said.set(color="white")


def _plain(text: str, longest: int = LONGEST) -> str:
    """A name on one line, not too long: what names have alike is often their beginning, so that the end stays too."""
    text = " ".join(text.split())
    text = text if len(text) <= longest else f"{text[: longest // 2]}…{text[-(longest // 2 - 1) :]}"
    return text.replace("$", r"\$")  # otherwise the beginning of a formula


def _column(records: Sequence[Mapping[str, Any]], along: str, name: str) -> tuple[Array, Array]:
    """A figure of the records that have it, and where each lies."""
    pairs = [(record[along], record[name]) for record in records if record.get(name) is not None]
    found = np.array([pair for pair in pairs if math.isfinite(pair[1])], np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def draw_task(task: Task, folder: Path, result: TaskResult) -> list[str]:
    """Draws the charts of a task; returns lines on those that could not be drawn."""
    return [line for name, make in _charts(task, folder, result) for line in draw(folder / f"{name}.png", make)]


def _charts(task: Task, folder: Path, result: TaskResult) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
    """The names of the charts that there can be, and how each is drawn."""
    runs, best, metric = result.runs, result.best, result.metric
    if metrics := {name: folder / name / METRICS for name in runs if (folder / name / METRICS).exists()}:
        yield "curves", lambda: curves(metrics, best, metric, task.name)
    if len(metrics) > 1:
        shown, items = {name: runs[name] for name in metrics}, len(next(iter(task.dev.values())))
        yield "grid", partial(grid, shown, best, f"{task.name}: {metric}", items)
    if metrics:
        yield "lengths", partial(_lengths, task)
    for split in task.dev if best is not None else ():
        yield f"answers_{split}", partial(_answers, task, folder / PREDICTIONS, split)
        if found := result.classes.get(split):
            classes = {name: found[name] for name in (*task.head.labels, *found) if name in found}  # in their order
            yield f"classes_{split}", partial(by_class, classes, f"{task.name}, {split}")


def _lengths(task: Task) -> Figure | None:
    """How long the training items are; None where none of them is longer than a model is given."""
    measured = list(measure(task.describe_split("train")))
    if not any((each.pieces > each.lengths.limit).any() for each in measured):
        return None
    return lengths(measured, f"{task.name}, train")


def _answers(task: Task, predictions: Path, split: str) -> Figure | None:
    """What the best run says of a split, against what is right; None where the task has no picture of that."""
    if (compared := task.compared(split, predictions)) is None:
        return None
    title = f"{task.name}, {split}"
    if compared.names:
        return confusion(compared.right, compared.said, compared.names, title)
    return scatter(compared.right, compared.said, title)
