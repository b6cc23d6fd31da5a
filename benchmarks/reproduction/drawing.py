"""A table that was measured, as a chart: what is claimed, scores along the pre-training, and its perplexities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.charts import PAGE_WIDTH
from benchmarks.reproduction.ledger import plain
from benchmarks.reproduction.results import TableResult
from benchmarks.reproduction.verdicts import Verdict
from pretraining.reporting.figures import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""Colours that people tell apart who see red and green alike."""
FOUND = {"holds": BLUE, "does not hold": ORANGE}
"""Colours of findings; the others are grey."""


class Place(NamedTuple):
    """A point of a curve, with the lowest and the highest of what it is the mean of."""

    x: float
    mean: float
    low: float
    high: float


Curves = dict[str, list[Place]]
"""Curves by their names."""


def chart_of(result: TableResult) -> Figure | None:
    """All charts of a table below one another; None where nothing can be drawn."""
    judged = [each for each in result.verdicts if each.interval]
    along = [(name, scores_along(result, name)) for name in result.columns] if result.curve else []
    drawn = [(name, curves) for name, curves in along if curves]
    perplexities = perplexities_of(result)
    heights = [1.0 + 0.36 * len(judged)] * bool(judged) + [2.6] * len(drawn) + [3.0] * bool(perplexities)
    if not heights:
        return None
    figure = new_figure(sum(heights))
    figure.set_figwidth(PAGE_WIDTH)
    panels: Iterator[Axes] = iter(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    if judged:
        draw_verdicts(next(panels), judged, result)
    for name, curves in drawn:
        axes = next(panels)
        draw_curves(axes, curves, f"{result.columns[name]}, with its spread", "pre-training done, %")
        for cell in (row.cells.get(name) for row in result.rows if row.fresh):
            if cell is not None and cell.mean is not None:
                axes.axhline(cell.mean, color=GREY, linestyle="--", linewidth=1)
    if perplexities:
        axes = next(panels)
        draw_curves(axes, perplexities, "perplexity of text that is held out", "steps")
        axes.set_yscale("log")
    return figure


def draw_verdicts(axes: Axes, judged: Sequence[Verdict], result: TableResult) -> None:
    """How far the one row is above the other, with the interval at 95%."""
    for number, each in enumerate(judged):
        colour = FOUND.get(each.finding.partition(" of ")[0], GREY)
        axes.plot(each.interval or (), [number] * 2, color=colour, linewidth=1.5)
        axes.plot(each.difference or 0.0, number, "o", color=colour, markersize=4)
    names = [f"{each.better} −\n{each.worse}, {result.columns[each.column]}" for each in judged]
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(judged)), names, fontsize=8)
    axes.set_ylim(len(judged) - 0.5, -0.5)
    axes.set_title("differences that are claimed, at 95%", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(axes: Axes, curves: Curves, title: str, along: str) -> None:
    """Curves with what they spread over."""
    for colour, (name, places) in zip(COLOURS * 3, curves.items(), strict=False):
        xs = [place.x for place in places]
        axes.plot(xs, [place.mean for place in places], ".-", color=colour, linewidth=1.2, label=name)
        axes.fill_between(
            xs, [place.low for place in places], [place.high for place in places], color=colour, alpha=0.2, linewidth=0
        )
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(along)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def scores_along(result: TableResult, column: str) -> Curves:
    """The scores of a column by how much of the pre-training lies behind them: a curve for each kind of rows."""
    curves: Curves = {}
    for row in result.rows:
        cell = row.cells.get(column)
        if cell is not None and cell.mean is not None and not row.fresh:
            reach = cell.spread or 0.0
            place = Place(100 * row.part, cell.mean, cell.mean - reach, cell.mean + reach)
            curves.setdefault(row.name.rpartition(" ")[0], []).append(place)
    return curves


def perplexities_of(result: TableResult) -> Curves:
    """The perplexities of every kind of pre-training by its steps, over its seeds."""
    seeds: dict[str, list[dict[int, float]]] = {}
    for outcome in result.runs.values():
        if outcome.curve:
            seeds.setdefault(plain(outcome), []).append(dict(outcome.curve))
    curves: Curves = {}
    for name, runs in seeds.items():
        for step in sorted(set.intersection(*(set(run) for run in runs))):
            values = [run[step] for run in runs]
            curves.setdefault(name, []).append(Place(step, fmean(values), min(values), max(values)))
    return curves
