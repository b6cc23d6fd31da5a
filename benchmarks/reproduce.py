#!/usr/bin/env python3
"""Makes a table of the paper: pre-trains its rows, fine-tunes them, and shows the scores beside the paper's.

    python benchmarks/reproduce.py --table 5 --scale demo
    python benchmarks/reproduce.py --figure 5 --scale tiny --plan
    python benchmarks/reproduce.py --table 8 --scale base --share 2/4

Finished runs are used, and the same command continues stopped ones. See docs/reproducing.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import re
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from rich.console import Console

from benchmarks.measure import PARTIAL, RESULTS, ResultsFile, run_command
from benchmarks.reproduction.commands import (
    CellLister,
    Command,
    divide_commands,
    join_flags,
    order_commands,
    split_flags,
)
from benchmarks.reproduction.declaration import Declared, ScaleName, load_table
from benchmarks.reproduction.inputs import find_lacking
from benchmarks.reproduction.results import build_tables, draw_curves
from benchmarks.reproduction.running import BENCHMARK, SETTLED, CommandRunner, Ledger, count_ranks, strip_seed
from benchmarks.reproduction.summing import TableSummary
from benchmarks.tables import ResultTable, show
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.progress import duration
from data_prep.common.supervision import INTERRUPTED, hear_signals
from pretraining.reporting.figures import draw

MOST_RANKS = 8
"""The largest number of processes for which a pre-training on CPUs is planned."""


@dataclass(frozen=True)
class Reproduce:
    """Makes a table of the paper at a scale."""

    table: int | None = None
    """Number of a table: 1 GLUE, 2 SQuAD 1.1, 3 SQuAD 2.0, 4 SWAG, 5 tasks of pre-training, 6 size, 7 features,
    8 masks."""
    figure: int | None = None
    """Number of a figure: 5, scores along the pre-training."""
    scale: ScaleName = "demo"
    """demo: a quarter of an hour on 2 cores; tiny, mini: hours on them; base, large: the paper's sizes."""
    plan: bool = False
    """Print the runs, their state and how long they take, and stop."""
    share: str = ""
    """Run part I of N of the runs, given as I/N, beside other commands in the same folder; a command without it makes
    the table."""
    ranks: int | None = None
    """Processes of a pre-training (default: one for each GPU, or by the scale)."""
    out: Path = Path("build/reproduction")
    """Folder of the runs, with a folder for each scale that its tables share."""
    results: Path = RESULTS
    """Folder for the table."""

    @property
    def name(self) -> str:
        """The name of the table, such as table5."""
        if (self.table is None) == (self.figure is None):
            raise UserError("which table? give --table 1 to 8, or --figure 5")
        return f"table{self.table}" if self.figure is None else f"figure{self.figure}"


class TimeEstimate(NamedTuple):
    """The minutes of a command, and the source of the estimate."""

    minutes: float | None
    source: str


class TablePlan:
    """The runs of a table; `left` are those still to do, and `waiting` has the names of those without data."""

    def __init__(
        self,
        declared: Declared,
        ledger: Ledger,
        commands: Sequence[Command],
        left: Sequence[Command],
        waiting: Collection[str],
    ) -> None:
        self._declared, self._ledger, self._commands, self._waiting = declared, ledger, commands, waiting
        self._times = self._forecast(left)

    def table(self) -> ResultTable:
        """Builds the table of all runs, with their state and time."""
        rows = []
        for command in self._commands:
            standing, outcome = self._ledger.find(command)
            time, note = TimeEstimate(outcome.seconds / 60 if outcome else None, "took" if outcome else ""), ""
            if command.name in self._times:
                note = ", again" * (standing in SETTLED) + ", no data" * (command.name in self._waiting)
                time = self._times[command.name]
            took = "" if time.minutes is None else duration(60 * time.minutes)
            rows.append([command.kind, command.label, standing + note, took, time.source, command.name])
        return ResultTable(self._declared.title, ["", "run", "", "time", "", "folder"], rows)

    def describe_total(self) -> str:
        """Describes the runs that are left: time, repeated runs, and runs without data."""
        known = [each.minutes for each in self._times.values() if each.minutes is not None]
        unknown = len(self._times) - len(known)
        again = sum(
            self._ledger.find(command)[0] in SETTLED for command in self._commands if command.name in self._times
        )
        lacking = sum(name in self._waiting for name in self._times)
        told = f"{len(self._times)} runs are left: {duration(60 * sum(known))}"
        told += f", and {unknown} of which nobody knows how long they take" if unknown else ""
        told += f"; {again} of them again, since what others need of them is not here" if again else ""
        return told + (f"; {lacking} of them when their data is there" if lacking else "")

    def _forecast(self, left: Sequence[Command]) -> dict[str, TimeEstimate]:
        """Estimates the time of each command that is left: as measured before, or by the scale or `--check`."""
        took, found = self._ledger.median_minutes(), {}
        for command in left:
            label = strip_seed(command.label)
            found[command.name] = TimeEstimate(took[label], "measured") if label in took else self._expect(command)
        return found

    def _expect(self, command: Command) -> TimeEstimate:
        """Estimates the time of a command by the scale, or of a pre-training by its plan on this machine."""
        scale = self._declared.scale
        said = scale.minutes.get(command.column if command.kind in ("tune", "pairs") else command.kind)
        if said is not None:
            said *= self._declared.restarts / scale.restarts if command.kind == "tune" else 1
            return TimeEstimate(said, "as the scale says")
        words = (word for word in command.words if not word.startswith("{"))
        planned = plan_minutes(*words) if command.kind == "train" else None
        return TimeEstimate(planned, "unknown" if planned is None else "as --check says, here")


@cache
def plan_minutes(*words: str) -> float | None:
    """Plans the minutes of a pre-training on this machine by the words of its command; None if unknown."""
    from pretraining.config.overrides import load_recipe
    from pretraining.training.preview import plan_run

    flags = split_flags(words)
    recipe, _ = flags.pop("--recipe")[0], flags.pop("--data")
    ranks = count_ranks(MOST_RANKS)
    with suppress(UserError):
        seconds = plan_run(load_recipe(Path(recipe), [*join_flags(flags)], ranks=ranks), None, ranks).seconds
        return None if seconds is None else seconds / 60
    return None


def read_share(text: str) -> tuple[int, int] | None:
    """Reads a share such as 2/4; None if the text is empty."""
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not found or int(found[1]) > int(found[2]):
        raise UserError(f"--share {text}: give I/N, such as 2/4: the second of four parts")
    return int(found[1]), int(found[2])


def make(wanted: Reproduce, console: Console) -> int:
    """Makes the table, or prints its plan; returns the exit code."""
    if wanted.ranks is not None and wanted.ranks < 1:
        raise UserError(f"--ranks {wanted.ranks}: give a whole number from 1 on")
    table = load_table(wanted.name, wanted.scale)
    part = read_share(wanted.share)
    root = wanted.out / wanted.scale
    ledger = Ledger(root, wanted.results, table.name)
    cells = [*CellLister(table).list_cells()]
    lacks = find_lacking(table)
    there = [cell for cell in cells if cell.column not in lacks]
    listed = order_commands(cells if wanted.plan else there)
    own = {command.name for command in (divide_commands(listed, part[1])[part[0] - 1] if part else listed)}
    for line in ledger.damaged:
        console.print(line, markup=False)
    for name, fault in lacks.items():
        console.print(f"{table.columns[name].title}: no data: {fault}", markup=False)
    if wanted.plan:
        left = [command for command in ledger.list_unfinished(cells) if command.name in own]
        waiting = {cell.command.name for cell in cells if cell.column in lacks}
        plan = TablePlan(table, ledger, listed, left, waiting)
        show(console, [plan.table()])
        console.print("\n".join([plan.describe_total(), *ledger.describe_commits(listed)]), markup=False)
        return Code.DONE
    hear_signals()
    signal.signal(signal.SIGUSR1, lambda *_: None)  # Slurm announces the end of a job by it; runs watch the clock
    runner = CommandRunner(table, root, ledger, wanted.ranks, console)
    try:
        stopped = runner.run([command for command in ledger.list_unfinished(there) if command.name in own])
        code = Code.STOPPED if stopped else Code.CURE if runner.fails else Code.DONE
    except KeyboardInterrupt:
        console.print(INTERRUPTED.strip())
        code = Code.INTERRUPTED
    if part is None:
        conclude(wanted, TableSummary(table, cells, ledger), code == Code.DONE and not lacks, console)
    return code


def conclude(wanted: Reproduce, found: TableSummary, complete: bool, console: Console) -> None:
    """Prints and writes the table: in place of an earlier one if it is complete or has as many runs, else beside it."""
    result = found.summarise()
    show(console, build_tables(result))
    replaces = complete or sum(run.code == 0 for run in result.runs.values()) >= found.ledger.own_runs
    path = wanted.results / f"{wanted.name}-{wanted.scale}{'' if replaces else PARTIAL}.json"
    path = ResultsFile(BENCHMARK, ["torch"], path).keep(result.model_dump(exclude_none=True), replaces=True)
    console.print(f"kept in {path}", markup=False)
    for line in draw(path.with_suffix(".png"), lambda: draw_curves(result)) if result.curve else ():
        console.print(line, markup=False)


if __name__ == "__main__":
    run_command(Reproduce, make)
