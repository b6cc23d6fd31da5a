"""What launches of scaling.py have found: points with their efficiency, a table, a plot, and a JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Turns, record, results_file, spread, write_results
from benchmarks.tables import cell
from data_prep.common.errors import UserError
from pretraining.reporting.figures import BLUE, GREY, ORANGE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SILENT = "seconds_without_communication"
BAR = 30
"""Characters of the longest bar, which stands for an efficiency of 100% unless one is higher."""


@dataclass(frozen=True)
class Note:
    """What one launch has found."""

    processes: int
    nodes: int
    threads: int
    """of each process"""
    device: str
    dtype: str
    steps: Mapping[str, Mapping[str, float]]
    """by the kind of scaling: sequences of all, seconds, and seconds without communication, where there is any"""

    @property
    def name(self) -> str:
        return f"{self.processes} × {self.threads}"


def read_notes(path: Path) -> list[Note]:
    """The launches that a file tells of, in their order."""
    try:
        notes = [Note(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: no notes of scaling.py ({error})") from error
    if not notes:
        raise UserError(f"{path}: tells of no launch")
    return notes


def describe_launch(note: Note) -> str:
    """A launch in one line."""
    where = f" on {note.nodes} nodes" if note.nodes > 1 else ""
    rates = [f"{kind} {step['sequences'] / step['seconds']:,.1f} sequences/s" for kind, step in note.steps.items()]
    return f"processes{where}: {note.processes}, threads of each: {note.threads}; {', '.join(rates)}"


def report(notes: Sequence[Note], described: Mapping[str, Any], out: Path | None, console: Console) -> None:
    """Prints, draws and keeps what all launches have found."""
    points = find_points(notes)
    found = {**described, "device": notes[0].device, "dtype": notes[0].dtype, "points": points}
    on_gpu = notes[0].device == "cuda"
    path = out or results_file("scaling", on_gpu)
    path = write_results(path, record("scaling", ["torch", "deepspeed"], found, on_gpu))
    save(plot(points), path.with_suffix(".png"))
    console.print(make_table(points))
    console.print(f"{conclude(points)}; kept in {path} and {path.with_suffix('.png')}")


def find_points(notes: Sequence[Note]) -> list[dict[str, Any]]:
    """For each kind of scaling and each number of processes: the speed, the efficiency against the fewest processes,
    what it would be without communication, and the share of a step that communication takes."""
    points = []
    for kind in ("weak", "strong"):
        launches = {note.name: note for note in notes if kind in note.steps}
        seconds: dict[str, list[float]] = {}
        for note in notes:
            for what, value in note.steps.get(kind, {}).items():
                seconds.setdefault(f"{note.name} {what}", []).append(value)
        rounds = min(map(len, seconds.values()), default=0)  # a job may have ended within a round
        turns = Turns({side: values[:rounds] for side, values in seconds.items()})
        base = min(launches.values(), key=lambda note: (note.processes, note.threads), default=None)
        points += [{"scaling": kind, **_point(turns, base, note, kind)} for note in launches.values() if base]
    return points


def _point(turns: Turns, base: Note, note: Note, kind: str) -> dict[str, Any]:
    sequences, side, silent = note.steps[kind]["sequences"], f"{note.name} seconds", f"{note.name} {SILENT}"
    work = (sequences / note.processes) / (base.steps[kind]["sequences"] / base.processes)

    def efficiency(of: str) -> dict[str, float]:
        return {name: round(value * work, 3) for name, value in turns.ratio(f"{base.name} seconds", of).items()}

    point = {
        "processes": note.processes,
        "nodes": note.nodes,
        "threads": note.threads,
        "sequences": int(sequences),
        "seconds_a_step": turns.of(side),
        "sequences_per_second": spread([sequences / seconds for seconds in turns.seconds[side]], 1),
        "efficiency": efficiency(side),
    }
    if silent in turns.seconds:
        communication = round(1 - turns.ratio(silent, side)["median"], 3)
        return {**point, "ideal": efficiency(silent), "communication": communication}
    alone = note.processes == 1
    return {**point, "ideal": point["efficiency"] if alone else None, "communication": 0.0 if alone else None}


def make_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """All points, with a bar for each efficiency, which goes on in a lighter shade up to the ideal: what the same
    processes reach without communication."""
    columns = ("scaling", "nodes", "processes", "threads of each", "sequences a step", "sequences/s", "efficiency")
    table = Table(*columns, "ideal", "communication", "", box=None)
    bar = BAR / max(1.0, *((point["ideal"] or point["efficiency"])["median"] for point in points))
    for point in points:
        speed, numbers = point["sequences_per_second"], (point[name] for name in ("nodes", "processes", "threads"))
        reached, ideal = point["efficiency"]["median"], (point["ideal"] or point["efficiency"])["median"]
        table.add_row(
            point["scaling"],
            *map(str, numbers),
            f"{point['sequences']:,}",
            cell(speed),
            f"{reached:.0%}",
            *(("–", "–") if point["ideal"] is None else (f"{ideal:.0%}", f"{point['communication']:.0%}")),
            "█" * round(bar * reached) + "▒" * (round(bar * ideal) - round(bar * reached)),
        )
    return table


def curves(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The points of each kind of scaling that differ in nothing but the number of processes."""
    fewest = min((point["processes"], point["threads"]) for point in points)[1]
    kinds = dict.fromkeys(point["scaling"] for point in points)
    alike = [point for point in points if point["threads"] == fewest or point["nodes"] > 1]
    return {kind: [point for point in alike if point["scaling"] == kind] for kind in kinds}


def conclude(points: Sequence[Mapping[str, Any]]) -> str:
    """The efficiencies in one line, by nodes where there are several."""
    unit = "nodes" if max(point["nodes"] for point in points) > 1 else "processes"
    told = [
        f"{kind} " + ", ".join(f"{point[unit]}: {point['efficiency']['median']:.0%}" for point in of_kind)
        for kind, of_kind in curves(points).items()
    ]
    return f"efficiency by {unit}: {'; '.join(told)}"


def plot(points: Sequence[Mapping[str, Any]]) -> Figure:
    """The speed by the number of processes: as measured, without communication, and as it would grow."""
    figure = new_figure(3.6)
    for axes, (kind, of_kind) in zip(figure.subplots(1, 2), curves(points).items(), strict=False):
        processes = [point["processes"] for point in of_kind]
        speeds = [
            [point["sequences_per_second"][name] for point in of_kind] for name in ("median", "lowest", "highest")
        ]
        each = speeds[0][0] / processes[0]
        axes.plot(processes, [each * count for count in processes], ":", color=GREY, label="in proportion")
        if all(point["ideal"] for point in of_kind):
            ideal = [each * point["processes"] * point["ideal"]["median"] for point in of_kind]
            axes.plot(processes, ideal, "--", color=BLUE, label="without communication")
        axes.plot(processes, speeds[0], "o-", color=ORANGE, label="measured")
        axes.fill_between(processes, speeds[1], speeds[2], color=ORANGE, alpha=0.25, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(processes, [str(count) for count in processes])
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set(title=f"{kind} scaling", xlabel="processes", ylabel="sequences a second")
        axes.legend()
    return figure
