"""What a table takes: its runs, how long they are and how that is known, and what is there already."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduction.commands import Command, join_flags, split_flags
from benchmarks.reproduction.declaration import Declared
from benchmarks.reproduction.ledger import Ledger, strip_seed
from benchmarks.reproduction.running import count_ranks
from benchmarks.tables import ResultTable
from data_prep.common.errors import UserError
from data_prep.common.progress import duration

MOST_RANKS = 8
"""Processes of a pre-training on CPUs, for which it is planned, where there are so many cores."""


class TimeEstimate(NamedTuple):
    """How long a command takes, and how that is known."""

    minutes: float | None
    source: str


class TablePlan:
    """The runs of a table, those that are left to do, and how long these take; `waiting` names those without data."""

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
        """All runs, with how they stand and how long they take or took."""
        rows = []
        for command in self._commands:
            standing, outcome = self._ledger.find(command)
            time, note = TimeEstimate(outcome.seconds / 60 if outcome else None, "took" if outcome else ""), ""
            if command.name in self._times:
                note = ", again" * (standing == "done") + ", no data" * (command.name in self._waiting)
                time = self._times[command.name]
            took = "" if time.minutes is None else duration(60 * time.minutes)
            rows.append([command.kind, command.label, standing + note, took, time.source, command.name])
        return ResultTable(self._declared.title, ["", "run", "", "time", "", "folder"], rows)

    def describe_total(self) -> str:
        """How long all runs take that are left, which are made again, and which wait for data."""
        known = [each.minutes for each in self._times.values() if each.minutes is not None]
        unknown = len(self._times) - len(known)
        again = sum(
            self._ledger.find(command)[0] == "done" for command in self._commands if command.name in self._times
        )
        lacking = sum(name in self._waiting for name in self._times)
        told = f"{len(self._times)} runs are left: {duration(60 * sum(known))}"
        told += f", and {unknown} of which nobody knows how long they take" if unknown else ""
        told += f"; {again} of them again, since what others need of them is not here" if again else ""
        return told + (f"; {lacking} of them when their data is there" if lacking else "")

    def _forecast(self, left: Sequence[Command]) -> dict[str, TimeEstimate]:
        """How long each command that is left takes: as it took here before, or as the scale or `--check` says."""
        took, found = self._ledger.median_minutes(), {}
        for command in left:
            label = strip_seed(command.label)
            found[command.name] = TimeEstimate(took[label], "measured") if label in took else self._expect(command)
        return found

    def _expect(self, command: Command) -> TimeEstimate:
        """How long a command takes by the scale, or a pre-training as it is planned on this machine."""
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
    """The minutes of a pre-training on this machine, of the words of its command; None where nobody knows."""
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
    """The part of the list that this command runs, as `2/4` says it; None where it runs all."""
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not found or int(found[1]) > int(found[2]):
        raise UserError(f"--share {text}: give I/N, such as 2/4: the second of four parts")
    return int(found[1]), int(found[2])
