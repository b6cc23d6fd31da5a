"""Charts of what was measured and planned: speed by processes, hours by GPUs, scores along a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.reproduction.results import TableResult
from pretraining.reporting.figures import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def planning_chart(others: Sequence[tuple[int, float, float]]) -> Figure:
    """Hours and efficiency over the number of GPUs."""
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2)
    gpus, hours, efficiencies = zip(*others, strict=True)
    left.plot(gpus, hours, marker="o", color=BLUE)
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="hours")
    right.plot(gpus, [100 * share for share in efficiencies], marker="o", color=ORANGE)
    right.set(xscale="log", ylim=(0, 105), xlabel="GPUs", ylabel="efficiency against one GPU, %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def curve_chart(result: TableResult) -> Figure:
    """The scores of every column by how much of the pre-training lies behind them, with their spread: a curve for each
    kind of rows, and a dashed line for fresh weights."""
    figure = new_figure(3.0 * len(result.columns))
    plots = figure.subplots(len(result.columns), squeeze=False)[:, 0]
    for axes, (name, title) in zip(plots, result.columns.items(), strict=True):
        scored = [(row, row.cells[name]) for row in result.rows if name in row.cells]
        points: dict[str, list[tuple[float, float, float]]] = {}
        for row, cell in scored:
            if cell.mean is not None and row.fresh:
                axes.axhline(cell.mean, color=GREY, linestyle="--", linewidth=1)
            elif cell.mean is not None:
                point = (100 * row.part, cell.mean, cell.spread or 0.0)
                points.setdefault(row.name.rpartition(" ")[0], []).append(point)
        for kind, of_kind in points.items():
            parts, means, spreads = zip(*of_kind, strict=True)
            axes.errorbar(parts, means, yerr=spreads, marker="o", capsize=3, label=kind)
        axes.set(title=title, xlabel="pre-training done, %")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure
