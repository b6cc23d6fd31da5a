#!/usr/bin/env python3
"""Makes a table of the paper: pre-trains its rows, fine-tunes them, and shows the scores beside the paper's.

    python benchmarks/reproduce.py table5 --scale demo
    python benchmarks/reproduce.py figure5 --scale tiny --plan
    python benchmarks/reproduce.py table8 --scale base --share 2/4

Finished runs are used, and the same command continues stopped ones. See docs/reproducing.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.markup import escape

from benchmarks.measure import PARTIAL, RESULTS, ROOT, ResultsFile, find_data_folder, run_command
from benchmarks.processes import follow
from benchmarks.reproduction.commands import Command, divide_commands, find_lacking, list_cells, order_commands
from benchmarks.reproduction.declaration import ScaledTable, ScaleName, load_table
from benchmarks.reproduction.outcomes import BENCHMARK, SETTLED, CommandOutcome, Ledger, read_ending, strip_seed
from benchmarks.reproduction.results import TableSummary, build_tables
from benchmarks.tables import ResultTable, show
from data_prep.common.capacity import num_cores
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.locks import locked
from data_prep.common.progress import duration
from data_prep.common.supervision import INTERRUPTED, hear_signals

OUT, LOGS, LOCKS = Path("build/reproduction"), "logs", "locks"
LAST_LINES = 3
"""The number of last lines that are shown of a command that failed without an error message."""


@dataclass(frozen=True)
class Reproduce:
    """Makes a table of the paper at a scale."""

    table: tyro.conf.Positional[str]
    """A table: table1 GLUE, table2 SQuAD 1.1, table3 SQuAD 2.0, table4 SWAG, table5 tasks of pre-training, table6 size,
    table7 features, table8 masks; or a figure: figure5, scores along the pre-training."""
    scale: ScaleName = "demo"
    """demo: a quarter of an hour on 2 cores; tiny, mini: hours on them; base, large: the paper's sizes."""
    plan: bool = False
    """Print the runs, their state and how long they take, and stop."""
    share: str = ""
    """Run part I of N of the runs, given as I/N, beside other commands in the same folder; a command without it makes
    the table."""
    out: Path = OUT
    """Folder of the runs, with a folder for each scale that its tables share, and of their tables, but for those of the
    usual folder, which are kept in benchmarks/results."""

    @property
    def results(self) -> Path:
        """Folder of the tables."""
        return RESULTS if self.out.resolve() == (ROOT / OUT).resolve() else self.out


def show_plan(
    table: ScaledTable, ledger: Ledger, commands: list[Command], left: list[Command], console: Console
) -> None:
    """Prints the runs of a table with their state and time, and the time of those that are left."""
    took = ledger.median_minutes()
    times = {command.name: estimate_minutes(command, table, took) for command in left}
    rows = []
    for command in commands:
        standing, outcome = ledger.find(command)
        minutes = times.get(command.name, outcome.seconds / 60 if outcome else None)
        state = "to do" if command.name in times and standing in SETTLED else standing
        time = "" if minutes is None else duration(60 * minutes)
        rows.append([command.kind, command.label, state, time, command.name])
    show(console, [ResultTable(table.title, ["", "run", "", "time", "folder"], rows)])
    known = [minutes for minutes in times.values() if minutes is not None]
    told = f"{len(times)} runs are left: {duration(60 * sum(known))}"
    told += f", and {len(times) - len(known)} of unknown time" if len(known) < len(times) else ""
    console.print(told, markup=False)


def estimate_minutes(command: Command, table: ScaledTable, took: Mapping[str, float]) -> float | None:
    """Estimates the minutes of a command: as measured before, or as the scale says."""
    label, scale = strip_seed(command.label), table.scale
    if label in took:
        return took[label]
    said = scale.minutes.get(command.column or command.kind)
    return said and said * (table.restarts / scale.restarts if command.kind == "tune" else 1)


class CommandRunner:
    """Runs commands in the folder of a scale."""

    def __init__(self, ledger: Ledger, ranks: int, console: Console) -> None:
        self._ledger, self._ranks, self._console = ledger, ranks, console

    def run(self, commands: Sequence[Command]) -> Code:
        """Runs commands. Returns STOPPED if one was stopped early, as by a time limit, which stops all; CURE if one has
        failed."""
        code = Code.DONE
        for number, command in enumerate(commands, 1):
            self._console.print(f"{number}/{len(commands)}  {command.kind}  {command.label}", markup=False)
            lacking = self._find_lacking(command)
            if lacking:
                self._console.print(f"    not run: {lacking}", markup=False)
                continue
            with locked(self._ledger.root / LOCKS / command.name, command.name, "{owner} is at it", patience=math.inf):
                if self._ledger.find(command)[0] == "done" and command.is_made(self._ledger.root):
                    continue  # by another process in the meantime
                outcome = self._run(command)
            self._console.print(f"    {outcome.said or 'done'}, {duration(outcome.seconds)}", markup=False)
            if outcome.is_stopped:
                return Code.STOPPED
            code = Code.CURE if outcome.code else code
        return code

    def _find_lacking(self, command: Command) -> str:
        """Describes which needed command has no result; empty if none."""
        for need in command.needs:
            outcome = self._ledger.find(need)[1]
            if outcome is None or not outcome.is_well:
                return f"{need.label}: {outcome.said if outcome else 'not made'}"
        return ""

    def _run(self, command: Command) -> CommandOutcome:
        """Runs a command, and records its outcome."""
        log, last = self._ledger.root / LOGS / f"{command.name}.log", deque[str](maxlen=50)
        start, begun = time.monotonic(), time.time()
        with self._console.status(command.label) as status:

            def say(line: str) -> None:
                last.append(line)
                status.update(escape(f"{command.label}  {line[:100]}"))

            try:
                code = follow(self._build_line(command), log, say, {**os.environ, "PYTHONUNBUFFERED": "1"})
            except KeyboardInterrupt:
                self._ledger.record(command, Code.STOPPED, "stopped", time.monotonic() - start)
                raise
        ended = read_ending(self._ledger.root / command.name, code, select_last_words(last), begun)
        return self._ledger.record(command, *ended, time.monotonic() - start)

    def _build_line(self, command: Command) -> list[str]:
        """Builds the command line, with a launcher for several ranks."""
        python, root = [sys.executable], self._ledger.root
        if command.kind == "train" and self._ranks > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks)]
        script, *words = command.build_words(lambda need: str(root / need.name), str(find_data_folder()))
        return [*python, str(ROOT / script), *words, "--out", str(root / command.name)]


def count_ranks(wanted: int) -> int:
    """Returns the processes of a pre-training: the number of GPUs, or that of the scale, at most the cores."""
    import torch

    return torch.cuda.device_count() or min(wanted, num_cores())


def select_last_words(lines: Sequence[str]) -> str:
    """Returns the last error of a command, or its last lines."""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else "\n".join(list(lines)[-LAST_LINES:])


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
    table = load_table(wanted.table, wanted.scale)
    share, lacks = read_share(wanted.share), find_lacking(table)
    ledger = Ledger(wanted.out / wanted.scale, wanted.results, table.name)
    cells = [cell for cell in list_cells(table) if wanted.plan or cell.column not in lacks]
    commands = order_commands(cells)
    own = {command.name for command in (divide_commands(commands, share[1])[share[0] - 1] if share else commands)}
    left = [command for command in ledger.list_unfinished(cells) if command.name in own]
    no_data = [f"{table.columns[name].title}: no data: {fault}" for name, fault in lacks.items()]
    for line in (*ledger.damaged, *no_data):
        console.print(line, markup=False)
    if wanted.plan:
        show_plan(table, ledger, commands, left, console)
        return Code.DONE
    hear_signals()
    signal.signal(signal.SIGUSR1, lambda *_: None)  # Slurm announces the end of a job by it; runs watch the clock
    try:
        code = CommandRunner(ledger, count_ranks(table.scale.ranks), console).run(left)
    except KeyboardInterrupt:
        console.print(INTERRUPTED.strip())
        code = Code.INTERRUPTED
    if share is None:
        write_table(wanted, table, ledger, code == Code.DONE and not lacks, console)
    return code


def write_table(wanted: Reproduce, table: ScaledTable, ledger: Ledger, complete: bool, console: Console) -> None:
    """Prints and writes the table: in place of an earlier one if it is complete or has as many runs, else beside it."""
    result = TableSummary(table, ledger).summarise()
    show(console, build_tables(result))
    replaces = complete or sum(run.code == 0 for run in result.runs.values()) >= ledger.own_runs
    path = wanted.results / f"{wanted.table}-{wanted.scale}{'' if replaces else PARTIAL}.json"
    path = ResultsFile(BENCHMARK, ["torch"], path).keep(result.model_dump(exclude_none=True), replaces=True)
    console.print(f"kept in {path}", markup=False)


if __name__ == "__main__":
    run_command(Reproduce, make, "reproducing")
