"""The report of scaling.py on its launches: points with their efficiency, a table, a plot, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.contests import Turns, spread
from benchmarks.measure import ResultsFile
from benchmarks.tables import show, summarise_scaling
from data_prep.common.errors import UserError
from pretraining.reporting.figures import BLUE, GREY, ORANGE, draw, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SILENT = "seconds_without_communication"


@dataclass(frozen=True)
class Note:
    """The results of one launch."""

    processes: int
    nodes: int
    threads: int
    """Threads of a process."""
    device: str
    dtype: str
    steps: Mapping[str, Mapping[str, float]]
    """Sequences of all processes, seconds, and seconds without communication if measured, by the kind of scaling."""
    tensor: int = 1
    """Processes that share a model."""

    @property
    def name(self) -> str:
        return f"{self.processes} × {self.threads}" + (f" / {self.tensor}" if self.tensor > 1 else "")


def read_notes(path: Path) -> list[Note]:
    """Reads the launches in a file, in their order."""
    try:
        notes = [Note(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: no notes of scaling.py ({error})") from error
    if not notes:
        raise UserError(f"{path}: tells of no launch")
    return notes


def describe_launch(note: Note) -> str:
    """Describes a launch in one line."""
    where = f" on {note.nodes} nodes" if note.nodes > 1 else ""
    speeds = [f"{kind} {step['sequences'] / step['seconds']:,.1f} sequences/s" for kind, step in note.steps.items()]
    shared = f", sharing a model: {note.tensor}" if note.tensor > 1 else ""
    return f"processes{where}: {note.processes}{shared}, threads of each: {note.threads}; {', '.join(speeds)}"


def report(notes: Sequence[Note], described: Mapping[str, Any], out: Path | None, console: Console) -> None:
    """Prints, draws and writes the results of all launches."""
    points = find_points(notes)
    found = {**described, "device": notes[0].device, "dtype": notes[0].dtype, "points": points}
    path = ResultsFile("scaling", ["torch", "deepspeed"], out, notes[0].device == "cuda").keep(found)
    show(console, summarise_scaling(found))
    chart = path.with_suffix(".png")
    drawn = draw(chart, lambda: draw_scaling(points)) or [str(chart)]
    console.print(f"{conclude(points)}; kept in {' and '.join([str(path), *drawn])}")


def find_points(notes: Sequence[Note]) -> list[dict[str, Any]]:
    """Returns, for each kind of scaling and number of processes, the speed, the efficiency against the fewest
    processes, the same without communication, and the share of communication in a step."""
    points = []
    for kind in ("weak", "strong"):
        launches = {note.name: note for note in notes if kind in note.steps}
        seconds: dict[str, list[float]] = {}
        for note in notes:
            for what, value in note.steps.get(kind, {}).items():
                seconds.setdefault(f"{note.name} {what}", []).append(value)
        rounds = min(map(len, seconds.values()), default=0)  # a job may end within a round
        turns = Turns({side: values[:rounds] for side, values in seconds.items()})
        base = min(launches.values(), key=lambda note: (note.processes, note.threads, note.tensor), default=None)
        points += [{"scaling": kind, **_point(turns, base, note, kind)} for note in launches.values() if base]
    return points


def _point(turns: Turns, base: Note, note: Note, kind: str) -> dict[str, Any]:
    sequences, side, silent = note.steps[kind]["sequences"], f"{note.name} seconds", f"{note.name} {SILENT}"
    work = (sequences / note.processes) / (base.steps[kind]["sequences"] / base.processes)

    def efficiency(of: str) -> dict[str, float]:
        return {name: round(value * work, 3) for name, value in turns.compute_ratio(f"{base.name} seconds", of).items()}

    point = {
        "processes": note.processes,
        "nodes": note.nodes,
        "threads": note.threads,
        "tensor": note.tensor,
        "sequences": int(sequences),
        "seconds_a_step": turns.summarise_side(side),
        "sequences_per_second": spread([sequences / seconds for seconds in turns.seconds[side]], 1),
        "efficiency": efficiency(side),
    }
    if silent in turns.seconds:
        communication = round(1 - turns.compute_ratio(silent, side)["median"], 3)
        return {**point, "ideal": efficiency(silent), "communication": communication}
    alone = note.processes == 1
    return {**point, "ideal": point["efficiency"] if alone else None, "communication": 0.0 if alone else None}


def conclude(points: Sequence[Mapping[str, Any]]) -> str:
    """Formats the efficiencies in one line, by nodes if there are several."""
    unit = "nodes" if max(point["nodes"] for point in points) > 1 else "processes"
    told = [
        f"{kind} " + ", ".join(f"{point[unit]}: {point['efficiency']['median']:.0%}" for point in of_kind)
        for kind, of_kind in group_points(points).items()
    ]
    return f"efficiency by {unit}: {'; '.join(told)}"


def group_points(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Groups points by the kind of scaling; keeps those that differ in the number of processes alone."""
    _, fewest, shared = min((point["processes"], point["threads"], point["tensor"]) for point in points)
    kinds = dict.fromkeys(point["scaling"] for point in points)
    same = [point for point in points if point["tensor"] == shared]
    alike = [point for point in same if point["threads"] == fewest or point["nodes"] > 1]
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
