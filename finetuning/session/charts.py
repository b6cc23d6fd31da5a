"""Charts of fine-tuning, as PNG files beside results.json: training curves, confusions, classes, lengths, searches.

A chart that cannot be drawn is reported, and fails nothing.
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
from finetuning.results import PREDICTIONS, ClassFigures, GroupScore, PairsResult, RunResult, TaskResult
from finetuning.session.item_checks import Measured, measure
from finetuning.tasks.scores import compute_wilson_limits
from finetuning.tasks.task import Task
from pretraining.reporting.figures import BLUE, GREY, ORANGE, WIDTH, draw, new_figure, smooth
from pretraining.reporting.metrics_file import METRICS, read_all_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST, LONGEST_TITLE = 24, 56
"""Characters of a name and of a title."""
LETTER = 135
"""Letters of one point to the inch."""
SMALLEST = 6.5
"""Points of the smallest letter that can be read."""
BARS = 60
"""Bars of a histogram, about."""
MOST_CLASSES = 40
"""Classes that are drawn: those with the lowest recall."""
MOST_GROUPS = 120
"""Paradigms that are drawn; of more, only the phenomena are."""
NAMELESS = "(none named)"
"""The name shown for a phenomenon or paradigm without one."""
VARIED = {"batch": "batch {}", "epochs": "{:g} epochs", "seed": "seed {}"}
"""The settings that distinguish the rows of a grid, and their labels."""
Groups = Mapping[str, Mapping[str, GroupScore]]
"""The scores of the paradigms of each phenomenon."""


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
    splits = right.get_legend_handles_labels()[1]
    right.set(xlabel="epoch", ylabel=f"{metric} × 100" + (f", on {splits[0]}" if len(splits) == 1 else ""))
    right.xaxis.get_major_locator().set_params(integer=len(right.lines) > 0 and right.get_xlim()[1] > 1.5)
    if len(splits) > 1:
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
    figure, axes = _open_chart(size * cell + 0.9 + (longest if upright else 0.2), title)
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


def draw_scatter(right: Array, said: Array, title: str) -> Figure:
    """Draws the scores that a model gives against the right ones."""
    figure, axes = _open_chart(6.4, title)
    known = np.isfinite(said)
    both = np.concatenate([right, said[known]])
    low, high = (float(both.min()), float(both.max())) if len(both) else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.5
    limits = (low - room, high + room)
    opacity = min(0.35, max(300 / max(len(right), 1), 0.02))
    axes.scatter(right[known], said[known], s=14, color=BLUE, alpha=opacity, linewidths=0)
    axes.plot(limits, limits, color=ORANGE, linewidth=1, linestyle="--", label="as they should be")
    axes.legend(frameon=False, loc="upper left")
    axes.set(xlabel="right", ylabel="said", xlim=limits, ylim=limits, aspect="equal")
    axes.grid(alpha=0.3)
    return figure


def draw_classes(classes: Mapping[str, ClassFigures], title: str) -> Figure:
    """Draws recall and precision of every class of results.json, with 95% intervals."""
    names = [*classes]
    recall, precision, items, said = (
        np.array([found[figure] or 0.0 for found in classes.values()], np.float64)
        for figure in ("recall", "precision", "items", "said")
    )
    known = np.where(items > 0, recall, np.inf)  # classes without items come last
    order = np.sort(np.argsort(known, kind="stable")[:MOST_CLASSES])
    few = f"the {len(order)} of {len(names)} classes of which least is found" * (len(order) < len(names))
    figure, axes = _open_chart(1.3 + 0.44 * len(order), title, few)
    places = -np.arange(len(order))
    found = "recall: found of those that are"
    _draw_bars(axes, places + 0.2, recall[order], items[order], height=0.36, color=BLUE, label=found)
    correct = "precision: right of those said to be"
    _draw_bars(axes, places - 0.2, precision[order], said[order], height=0.36, color=ORANGE, label=correct)
    axes.set_yticks(places, [_shorten(names[number]) for number in order])
    axes.set(ylim=(0.6 - len(order), 0.6), xlabel="% (lines: 95% intervals of so many items)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_pairs(result: PairsResult, groups: Groups) -> Figure:
    """Draws the share of minimal pairs that a model gets right: of all, of each phenomenon and of its paradigms."""
    bars: list[tuple[str, GroupScore, str]] = [("all", result, BLUE)]
    for phenomenon, paradigms in groups.items():
        if phenomenon or len(groups) > 1:
            bars.append((phenomenon or NAMELESS, result.phenomena[phenomenon], BLUE))
        if len(result.paradigms) <= MOST_GROUPS and [*paradigms] != [""]:
            bars += [(name or NAMELESS, score, GREY) for name, score in paradigms.items()]
    names, scores, colors = zip(*bars, strict=True)
    figure, axes = _open_chart(1.2 + 0.19 * len(bars), f"{result.model}: minimal pairs (dashed: chance)")
    places = -np.arange(len(bars))
    shares, pairs = np.array([(score.accuracy, score.pairs) for score in scores]).T
    _draw_bars(axes, places, shares, pairs, height=0.75, color=colors)
    axes.axvline(100 * result.chance, color=ORANGE, linewidth=1.2, linestyle="--", zorder=3)
    axes.set_yticks(places, [name.replace("_", " ").replace("$", r"\$") for name in names], fontsize=7)
    for label, color in zip(axes.get_yticklabels(), colors, strict=True):
        label.set_fontweight("bold" if color == BLUE else "normal")
    axes.set(ylim=(0.6 - len(bars), 0.6), xlabel="% of pairs whose good sentence is likelier (lines: 95%)")
    return figure


def _draw_bars(axes: Axes, places: Array, shares: Array, items: Array, **style: Any) -> None:
    """Draws horizontal bars for shares of a number of items, each with its 95% interval, its value and its items."""
    low, high = compute_wilson_limits(shares * items, items)
    reach = 100 * np.maximum([shares - low, high - shares], 0) * (items > 0)
    axes.barh(places, 100 * shares, alpha=0.8, **style)
    axes.errorbar(100 * shares, places, xerr=reach, fmt="none", ecolor="black", elinewidth=0.8)
    for place, share, number, end in zip(places, shares, items, 100 * shares + reach[1], strict=True):
        text = f"{100 * share:.1f}% of {number:,.0f}" if number else "none"
        axes.text(end + 1.2, place, text, va="center", fontsize=7)
    axes.set_xlim(0, 122)
    axes.set_xticks(range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)


def draw_lengths(measured: Sequence[Measured], title: str) -> Figure:
    """Draws how many pieces the items have, and the limit beyond which they are cut off or read in parts."""
    figure = new_figure(0.5 + 2.5 * len(measured))
    for axes, each in zip(figure.subplots(len(measured), 1, squeeze=False)[:, 0], measured, strict=True):
        limit, pieces = each.lengths.limit, each.pieces
        reach = max(limit * 1.15, float(np.quantile(pieces, 0.995)) * 1.05)
        step = math.ceil(reach / BARS)
        edges = 0.5 + np.arange(limit % step - step, reach + step, step)  # one of them at the limit
        reach, too_long = float(edges[-1]), pieces > limit
        shown = [np.minimum(part, reach) for part in (pieces[~too_long], pieces[too_long])]
        axes.hist(shown, edges, stacked=True, color=[BLUE, ORANGE])
        axes.axvline(limit, color="black", linewidth=1.2, linestyle="--")
        fate = "cut off there" if each.lengths.cuts else "read in parts"
        longer = f"{100 * too_long.mean():.1f}% are {fate}, the longest has {pieces.max():,}"
        said = longer if too_long.any() else "none is longer"
        axes.set_title(f"{each.lengths.setting} = {limit}: {said}", loc="left", fontsize=9)
        last = f" (the last bar: {edges[-2]:,.0f} and more)" * bool(pieces.max() > reach)
        axes.set(xlabel=f"pieces of {each.lengths.what}{last}", xlim=(0, reach))
        axes.set_ylabel("a sample of items" if each.is_sample else "items")
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    _set_title(figure, title)
    return figure


def draw_grid(runs: Mapping[str, RunResult], best: str | None, title: str, items: int) -> Figure:
    """Draws the scores of all runs by learning rate, and by batch, epochs and seed where they differ.

    The colour scale spans at least the sampling error of `items`, so that scores that may be equal look equal. Runs
    that failed, or whose model always gives the same answer, stay white.
    """
    rates = sorted({run.settings["learning_rate"] for run in runs.values()})
    values = {name: sorted({run.settings[name] for run in runs.values()}) for name in VARIED}
    rows = list(product(*values.values()))
    scored = {name: run.score for name, run in runs.items() if run.score is not None and not run.degenerate}
    high = max(scored.values(), default=1.0)
    least, most = compute_wilson_limits(np.clip(high, 0.0, 1.0) * items, items)
    low = min([*scored.values(), high - float(most - least)])
    legend = ["bold: the best"] if best else []
    legend += [f"palest: {100 * (high - low):.1f} below the best"] if len(scored) > 1 else []
    legend += ["white: failed, or always the same answer"] if len(scored) < len(runs) else []
    figure, axes = _open_chart(1.9 + 0.36 * len(rows), title, "; ".join(legend))
    cells = np.full((len(rows), len(rates)), np.nan)
    for name, run in runs.items():
        row = rows.index(tuple(run.settings[key] for key in VARIED))
        column = rates.index(run.settings["learning_rate"])
        cells[row, column] = scored.get(name, np.nan)
        text = "failed" if run.score is None else f"{100 * run.score:.1f}"
        color = "white" if scored.get(name, low) > low + 0.6 * (high - low) else "black"
        weight = "bold" if name == best else "normal"
        axes.text(column, row, text, ha="center", va="center", color=color, weight=weight)
    axes.imshow(cells, cmap="Blues", vmin=low - 0.1 * (high - low), vmax=high + 0.2 * (high - low), aspect="auto")
    shown = [VARIED[key] * (len(tried) > 1) for key, tried in values.items()]  # empty where it does not vary
    labels = [", ".join(filter(None, map(str.format, shown, row))) for row in rows]
    rounded = [re.sub(r"\.?0*e([+-])0?", r"e\1", f"{rate:e}") for rate in rates]
    axes.set_xticks(range(len(rates)), rounded, rotation=90 if len(rates) > 8 else 0)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlabel("learning rate")
    axes.tick_params(length=0)
    return figure


def _open_chart(height: float, title: str, legend: str = "") -> tuple[Figure, Axes]:
    """Makes a figure of one chart, with its title and what the colours mean."""
    figure = new_figure(height)
    _set_title(figure, title, legend)
    return figure, figure.subplots()


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
    return [line for name, make in _list_charts(task, folder, result) for line in draw(folder / f"{name}.png", make)]


def _list_charts(task: Task, folder: Path, result: TaskResult) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
    """Yields the name of each chart of a task, and the function that draws it."""
    runs, best, metric = result.runs, result.best, result.metric
    if metrics := {name: folder / name / METRICS for name in runs if (folder / name / METRICS).exists()}:
        yield "curves", lambda: draw_curves(metrics, best, metric, task.name)
        yield "lengths", partial(_draw_long_items, task)
    if len(metrics) > 1:
        shown, items = {name: runs[name] for name in metrics}, result.items.get(result.first_split, 1)
        yield "grid", partial(draw_grid, shown, best, f"{task.name}: {metric}", items)
    for split in task.dev if best is not None else ():
        yield f"answers_{split}", partial(_draw_answers, task, folder / PREDICTIONS, split)
        if found := result.classes.get(split):
            classes = {name: found[name] for name in (*task.head.labels, *found) if name in found}  # in their order
            yield f"classes_{split}", partial(draw_classes, classes, f"{task.name}, {split}")


def _draw_long_items(task: Task) -> Figure | None:
    """Draws the lengths of the training items; None where all of them fit."""
    measured = list(measure(task.describe_split("train")))
    if not any((each.pieces > each.lengths.limit).any() for each in measured):
        return None
    return draw_lengths(measured, f"{task.name}, train")


def _draw_answers(task: Task, predictions: Path, split: str) -> Figure | None:
    """Draws the answers of the best run against the right ones; None for a task without such a chart."""
    if (compared := task.read_compared(split, predictions)) is None:
        return None
    title = f"{task.name}, {split}"
    if compared.names:
        return draw_confusion(compared.right, compared.said, compared.names, title)
    return draw_scatter(compared.right, compared.said, title)
