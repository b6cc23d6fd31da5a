"""The chart of scaling: speed by processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretraining.reporting.figures import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def group_points(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Groups points by the kind of scaling; keeps those that differ in the number of processes alone."""
    fewest = min((point["processes"], point["threads"]) for point in points)[1]
    kinds = dict.fromkeys(point["scaling"] for point in points)
    alike = [point for point in points if point["threads"] == fewest or point["nodes"] > 1]
    return {kind: [point for point in alike if point["scaling"] == kind] for kind in kinds}


def draw_scaling(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the speed by the number of processes: measured, without communication, and in proportion."""
    figure = new_figure(3.6)
    for axes, (kind, of_kind) in zip(figure.subplots(1, 2), group_points(points).items(), strict=False):
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
