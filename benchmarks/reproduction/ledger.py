"""The state of the commands of a table: done here, kept in committed results, failed, begun, or to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import ValidationError

from benchmarks.measure import find_commit, name_hardware, read_results
from benchmarks.reproduction.commands import Command, TableCell, order_commands
from benchmarks.reproduction.outcomes import CommandOutcome, read_outcome
from benchmarks.reproduction.results import TableResult
from data_prep.common.errors import UserError

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
        self.damaged: list[str] = []
        """A line for each file of results that cannot be read."""
        own = f"{table}-{root.name}"
        for path in sorted(results.glob(f"*-{root.name}.json"), key=lambda path: (path.stem == own, path)):
            try:
                runs = TableResult.read(path).runs if read_results(path)["benchmark"] == BENCHMARK else {}
            except (UserError, ValidationError) as error:
                self.damaged.append(f"{path}: damaged, and passed over: {str(error).splitlines()[0]}")
            else:
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
        commands = order_commands(cells)
        shown = {cell.command.name for cell in cells} | {
            command.name for command in commands if command.kind == "train"
        }
        wanted = {
            command.name for command in commands if command.name in shown and self.find(command)[0] not in SETTLED
        }
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
        told = ", ".join(f"{count} runs at {name}" for name, count in others.items())
        return [f"made at another commit than this: {told}"] if told else []

    def median_minutes(self) -> dict[str, float]:
        """Returns the median minutes of commands on this hardware, in all tables of the scale, by label."""
        notes = (read_outcome(path) for path in (self._root / NOTES).glob("*/*.json"))
        found: dict[str, list[float]] = {}
        for outcome in (*filter(None, notes), *self._kept.values()):
            if outcome.code == 0 and outcome.hardware == name_hardware():
                found.setdefault(strip_seed(outcome.label), []).append(outcome.seconds / 60)
        return {made: median(each) for made, each in found.items()}


def strip_seed(label: str) -> str:
    """Removes the seed from a label."""
    return label.rpartition(" seed ")[0] or label
