"""The plan of a table: its runs, their state, how long they take, and the source of that time."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduction.commands import Command, join_flags, split_flags
from benchmarks.reproduction.declaration import Declared
from benchmarks.reproduction.running import SETTLED, Ledger, count_ranks, strip_seed
from benchmarks.tables import ResultTable
from data_prep.common.errors import UserError
from data_prep.common.progress import duration

MOST_RANKS = 8
"""The largest number of processes for which a pre-training on CPUs is planned."""


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
