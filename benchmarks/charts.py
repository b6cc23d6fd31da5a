"""Charts of what was measured: ratios with their spread, and speed by processes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretraining.reporting.figures import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_WIDTH = 5.6
"""Inches of a chart on a page: narrow, so that its words can be read on a phone."""
LEGEND = 60
"""Letters that a line of a legend has room for."""


def embedded(figure: Figure) -> str:
    """The chart as a data URL, so that a page needs no other file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def ratio_chart(ratios: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A row for each contest, a dot for each peer: how many times as fast we are, from the lowest to the highest."""
    peers = list(dict.fromkeys(peer for each in ratios.values() for peer in each))
    figure = new_figure(1.2 + len(ratios) * (0.16 + 0.1 * len(peers)))
    figure.set_figwidth(PAGE_WIDTH)
    axes = figure.subplots()
    for number, peer in enumerate(peers):
        shift = 0.7 * ((number + 0.5) / len(peers) - 0.5)
        for row, contest in enumerate(ratios.values()):
            if peer in contest:
                found = contest[peer] if isinstance(contest[peer], Mapping) else {"median": contest[peer]}
                middle = found["median"]
                ends = found.get("lowest", middle), found.get("highest", middle)
                axes.plot(ends, [row + shift] * 2, color=f"C{number}", linewidth=1.5, alpha=0.5)
                axes.plot(middle, row + shift, "o", color=f"C{number}", markersize=4)
        axes.plot([], [], "o", color=f"C{number}", label=peer)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(ratios)), list(ratios))
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set(xlabel="times as fast as others (1: as fast)")
    axes.spines[["top", "right"]].set_visible(False)
    columns = max(1, min(len(peers), LEGEND // max(map(len, peers))))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    return figure


def curves(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The points of each kind of scaling that differ in nothing but the number of processes."""
    fewest = min((point["processes"], point["threads"]) for point in points)[1]
    kinds = dict.fromkeys(point["scaling"] for point in points)
    alike = [point for point in points if point["threads"] == fewest or point["nodes"] > 1]
    return {kind: [point for point in alike if point["scaling"] == kind] for kind in kinds}


def scaling_chart(points: Sequence[Mapping[str, Any]]) -> Figure:
    """The speed by the number of processes: as measured, without communication, and as it would grow."""
    figure = new_figure(3.6)
    for axes, (kind, of_kind) in zip(figure.subplots(1, 2), curves(points).items(), strict=False):
        processes = [point["processes"] for point in of_kind]
        middles, lowest, highest = (
            [point["sequences_per_second"][name] for point in of_kind] for name in ("median", "lowest", "highest")
        )
        each = middles[0] / processes[0]
        axes.plot(processes, [each * count for count in processes], ":", color=GREY, label="in proportion")
        if all(point["ideal"] for point in of_kind):
            ideal = [each * point["processes"] * point["ideal"]["median"] for point in of_kind]
            axes.plot(processes, ideal, "--", color=BLUE, label="without communication")
        axes.plot(processes, middles, "o-", color=ORANGE, label="measured")
        axes.fill_between(processes, lowest, highest, color=ORANGE, alpha=0.25, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(processes, [str(count) for count in processes])
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set(title=f"{kind} scaling", xlabel="processes", ylabel="sequences a second")
        axes.legend()
    return figure
