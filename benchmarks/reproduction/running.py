"""Runs the commands of a table one after another, and records their outcomes, from which the next run goes on."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

from benchmarks.measure import ROOT, find_commit, find_data_folder, name_hardware, read_results
from benchmarks.processes import follow
from benchmarks.reproduction.commands import Command, TableCell, order_commands
from benchmarks.reproduction.declaration import Declared
from benchmarks.reproduction.outcomes import CommandOutcome, describe_outcome, read_ending, read_outcome
from benchmarks.reproduction.results import TableResult
from data_prep.common.capacity import num_cores
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.locks import locked
from data_prep.common.progress import duration

BENCHMARK = "reproduction"
NOTES = "notes"
Standing = Literal["done", "kept", "failed", "begun", "to do"]
SETTLED = ("done", "kept")
"""The states of commands whose outcomes are used."""


class Ledger:
    """The outcomes of commands, in the folder of a scale and in committed results. The name of a command is a hash of
    its words and inputs: an outcome under the same name is used, and no other."""

    def __init__(self, root: Path, results: Path, table: str) -> None:
        """`root` is the folder of the scale; `results` has committed tables, of which this table's own prevails."""
        self._root = root
        self._kept: dict[str, CommandOutcome] = {}
        self.own_runs = 0
        """The number of runs without a fault in the table's own file of results."""
        self.damaged: list[str] = []
        """A line for each file of results that cannot be read."""
        own = f"{table}-{root.name}"
        for path in sorted(results.glob(f"*-{root.name}.json"), key=lambda path: (path.stem == own, path)):
            try:
                found = read_results(path)
                runs = TableResult.model_validate(found, strict=False).runs if found["benchmark"] == BENCHMARK else {}
            except (UserError, ValidationError) as error:
                self.damaged.append(f"{path}: damaged, and passed over: {str(error).splitlines()[0]}")
            else:
                if path.stem == own:
                    self.own_runs = sum(outcome.code == 0 for outcome in runs.values())
                self._kept |= {name: outcome for name, outcome in runs.items() if outcome.code == 0}

    def note_path(self, command: Command) -> Path:
        """Returns the path of a command's outcome."""
        return self._root / NOTES / f"{command.name}.json"

    def find(self, command: Command) -> tuple[Standing, CommandOutcome | None]:
        """Returns the state of a command, and its outcome."""
        outcome = read_outcome(self.note_path(command))
        if outcome is not None and not outcome.is_stopped:
            return ("failed" if outcome.code else "done"), outcome
        if command.name in self._kept:
            return "kept", self._kept[command.name]
        return ("begun" if (self._root / command.name).exists() else "to do"), None

    def list_unfinished(self, cells: Sequence[TableCell]) -> list[Command]:
        """Returns the commands to run, in order: those without an outcome, and those that they need whose results are
        missing."""
        commands, shown = order_commands(cells), {cell.command.name for cell in cells}
        used = [command for command in commands if command.name in shown or command.kind == "train"]
        wanted = {command.name for command in used if self.find(command)[0] not in SETTLED}
        for command in reversed(commands):
            if command.name in wanted:
                wanted |= {need.name for need in command.needs if not self._serves(need)}
        return [command for command in commands if command.name in wanted]

    def _serves(self, command: Command) -> bool:
        """Whether a command that others need is not to run again: its result exists, or it would diverge again."""
        standing, outcome = self.find(command)
        return outcome is not None and standing in SETTLED and (outcome.diverged or command.is_made(self._root))

    def describe_commits(self, commands: Iterable[Command]) -> list[str]:
        """Returns a line on outcomes of other commits than this one, if there are any."""
        now = find_commit()
        found = (self.find(command)[1] for command in commands)
        others = Counter(outcome.commit or "unknown" for outcome in found if outcome and outcome.commit != now)
        told = ", ".join(f"{count} run{'s' * (count > 1)} at {name}" for name, count in others.items())
        return [f"made at another commit than this: {told}"] if told else []

    def median_minutes(self) -> dict[str, float]:
        """Returns the median minutes of commands on this hardware, in all tables of the scale, by label."""
        notes = (read_outcome(path) for path in (self._root / NOTES).glob("*/*.json"))
        found: dict[str, list[float]] = {}
        here = name_hardware()
        for outcome in (*filter(None, notes), *self._kept.values()):
            if outcome.code == 0 and outcome.hardware == here:
                found.setdefault(strip_seed(outcome.label), []).append(outcome.seconds / 60)
        return {made: median(each) for made, each in found.items()}


def strip_seed(label: str) -> str:
    """Removes the seed from a label."""
    return label.rpartition(" seed ")[0] or label


LOGS, LOCKS = "logs", "locks"
LAST_LINES = 3
"""The number of last lines that are shown of a command that failed without an error message."""
FOR_EVER = 10.0**9
"""Seconds to wait for a command that another process runs."""


class CommandRunner:
    """Runs commands in the folder of a scale."""

    def __init__(self, declared: Declared, root: Path, ledger: Ledger, ranks: int | None, console: Console) -> None:
        self._root, self._ledger, self._console = root, ledger, console
        self._ranks = ranks or count_ranks(declared.scale.ranks)
        self.fails = False
        """Whether a command has failed."""

    def run(self, commands: Sequence[Command]) -> bool:
        """Runs commands. Returns True if one was stopped early, as by a time limit, which stops all."""
        for number, command in enumerate(commands, 1):
            self._console.print(f"{number}/{len(commands)}  {command.kind}  {command.label}", markup=False)
            if lacking := self._lacking(command):
                self._console.print(f"    not run: {lacking}", markup=False)
                continue
            with locked(self._root / LOCKS / command.name, command.name, "{owner} is at it", patience=FOR_EVER):
                if self._ledger.find(command)[0] == "done" and command.is_made(self._root):
                    continue  # by another process in the meantime
                outcome = self._run(command)
            self._console.print(f"    {outcome.said or 'done'}, {duration(outcome.seconds)}", markup=False)
            if outcome.is_stopped:
                return True
            self.fails |= outcome.code != 0
        return False

    def _lacking(self, command: Command) -> str:
        """Describes which needed command has no result; empty if none."""
        for need in command.needs:
            outcome = self._ledger.find(need)[1]
            if outcome is None or not outcome.is_well:
                return f"{need.label}: {outcome.said if outcome else 'not made'}"
        return ""

    def _run(self, command: Command) -> CommandOutcome:
        """Runs a command, and records its outcome."""
        last: deque[str] = deque(maxlen=50)
        log = self._root / LOGS / f"{command.name}.log"
        before, start, begun = self._before(command), time.monotonic(), time.time()

        def note(code: int, said: str) -> CommandOutcome:
            outcome = describe_outcome(command, self._root, code, said, before + time.monotonic() - start)
            outcome.write(self._ledger.note_path(command))
            return outcome

        with self._console.status(command.label) as status:

            def say(line: str) -> None:
                last.append(line)
                status.update(escape(f"{command.label}  {line[:100]}"))

            try:
                code = follow(self._command(command), log, say, {**os.environ, "PYTHONUNBUFFERED": "1"})
            except KeyboardInterrupt:
                note(Code.STOPPED, "stopped")
                raise
        return note(*read_ending(self._root / command.name, code, select_last_words(last), begun))

    def _before(self, command: Command) -> float:
        """Returns the seconds of earlier starts of a command that was stopped."""
        earlier = read_outcome(self._ledger.note_path(command))
        return earlier.seconds if earlier is not None and earlier.is_stopped else 0.0

    def _command(self, command: Command) -> list[str]:
        """Builds the command line, with a launcher for several ranks."""
        python = [sys.executable]
        if command.kind == "train" and self._ranks > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks)]
        script, *words = command.build_words(self._root, find_data_folder())
        return [*python, str(ROOT / script), *words]


def count_ranks(wanted: int) -> int:
    """Returns the processes of a pre-training: the number of GPUs, or that of the scale, at most the cores."""
    import torch

    return torch.cuda.device_count() or min(wanted, num_cores())


def select_last_words(lines: Sequence[str]) -> str:
    """Returns the last error of a command, or its last lines."""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else "\n".join(list(lines)[-LAST_LINES:])
