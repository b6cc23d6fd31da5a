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

import signal
from dataclasses import dataclass

from rich.console import Console

from benchmarks.measure import RESULTS, ResultsFile, run_command
from benchmarks.reproduction.commands import CellLister, divide_commands, order_commands
from benchmarks.reproduction.declaration import ScaleName, load_table
from benchmarks.reproduction.inputs import find_lacking
from benchmarks.reproduction.planning import TablePlan, read_share
from benchmarks.reproduction.results import build_tables, draw_curves
from benchmarks.reproduction.running import BENCHMARK, CommandRunner, Ledger
from benchmarks.reproduction.summing import TableSummary
from benchmarks.tables import show
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.supervision import INTERRUPTED, hear_signals
from pretraining.reporting.figures import draw


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
        if runner.run([command for command in ledger.list_unfinished(there) if command.name in own]):
            return Code.STOPPED
    except KeyboardInterrupt:
        console.print(INTERRUPTED.strip())
        return Code.INTERRUPTED
    if part is None:
        conclude(wanted, TableSummary(table, cells, ledger), console)
    return Code.DONE


def conclude(wanted: Reproduce, summing: TableSummary, console: Console) -> None:
    """Prints and writes the table."""
    result = summing.summarise()
    show(console, build_tables(result))
    path = ResultsFile(BENCHMARK, ["torch"], wanted.results / f"{wanted.name}-{wanted.scale}.json").keep(
        result.model_dump(exclude_none=True)
    )
    console.print(f"kept in {path}", markup=False)
    for line in draw(path.with_suffix(".png"), lambda: draw_curves(result)) if result.curve else ():
        console.print(line, markup=False)


if __name__ == "__main__":
    run_command(Reproduce, make)
