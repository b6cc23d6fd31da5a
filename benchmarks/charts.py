"""Charts of what was measured: ratios with their spread, and lines through points, as images that a page embeds."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretraining.reporting.figures import GREY, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]
PAGE_WIDTH = 5.6
"""Inches of a chart on a page: narrow, so that its words can be read on a phone."""


def embedded(figure: Figure) -> str:
    """The chart as an address that holds all of it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def ratio_bars(ratios: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """A bar for each contest and peer: how many times as fast we are, with the lowest and the highest where known."""
    peers = list(dict.fromkeys(peer for each in ratios.values() for peer in each))
    height = 0.9 / len(peers)
    figure = new_figure(0.9 + 0.18 * len(ratios) * (len(peers) + 1))
    figure.set_figwidth(PAGE_WIDTH)
    axes = figure.subplots()
    for number, peer in enumerate(peers):
        named = [(place, each[peer]) for place, each in enumerate(ratios.values()) if peer in each]
        places = [place + height * (number - (len(peers) - 1) / 2) for place, _ in named]
        spreads = [each if isinstance(each, Mapping) else {"median": each} for _, each in named]
        middles = [each["median"] for each in spreads]
        ends = [(each.get("lowest", each["median"]), each.get("highest", each["median"])) for each in spreads]
        reach = [[middle - low for middle, (low, _) in zip(middles, ends, strict=True)],
                 [high - middle for middle, (_, high) in zip(middles, ends, strict=True)]]  # fmt: skip
        axes.barh(places, middles, 0.85 * height, xerr=reach, error_kw={"elinewidth": 0.8}, label=peer)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_yticks(range(len(ratios)), list(ratios))
    axes.invert_yaxis()
    axes.set(xlabel="times as fast as others (1: as fast)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(3, len(peers)), frameon=False)
    return figure


def lines(series: Mapping[str, Sequence[Point]], across: str, up: str, log: bool = False) -> Figure:
    """A line through the points of each series; `log` where devices are counted across, of which each doubles."""
    figure = new_figure(3.8)
    figure.set_figwidth(PAGE_WIDTH)
    axes = figure.subplots()
    for name, line in series.items():
        axes.plot(*zip(*line, strict=True), marker="o" if len(line) <= 20 else None, label=name)
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure
