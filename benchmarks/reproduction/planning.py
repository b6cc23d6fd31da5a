"""What a table takes: its runs, how long they are and how that is known, and what is there already."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduction.declaration import Declared
from benchmarks.reproduction.ledger import Ledger, without_seed
from benchmarks.reproduction.running import count_ranks
from benchmarks.reproduction.steps import Step, parted, together
from benchmarks.tables import ResultTable
from data_prep.common.errors import UserError
from data_prep.common.progress import duration

MOST_RANKS = 8
"""Processes of a pre-training on CPUs, for which it is planned, where there are so many cores."""


class Minutes(NamedTuple):
    """How long a command takes, and how that is known."""

    minutes: float | None
    source: str


class Plan:
    """The runs of a table, those that are left to do, and how long these take; `waiting` names those without data."""

    def __init__(
        self, declared: Declared, ledger: Ledger, steps: Sequence[Step], left: Sequence[Step], waiting: Collection[str]
    ) -> None:
        self._declared, self._ledger, self._steps, self._waiting = declared, ledger, steps, waiting
        self._times = self._forecast(left)

    def table(self) -> ResultTable:
        """All runs, with how they stand and how long they take or took."""
        rows = []
        for step in self._steps:
            standing, outcome = self._ledger.find(step)
            time, note = Minutes(outcome.seconds / 60 if outcome else None, "took" if outcome else ""), ""
            if step.name in self._times:
                note = ", again" * (standing == "done") + ", no data" * (step.name in self._waiting)
                time = self._times[step.name]
            took = "" if time.minutes is None else duration(60 * time.minutes)
            rows.append([step.kind, step.label, standing + note, took, time.source, step.name])
        return ResultTable(self._declared.title, ["", "run", "", "time", "", "folder"], rows)

    def total(self) -> str:
        """How long all runs take that are left, which are made again, and which wait for data."""
        known = [each.minutes for each in self._times.values() if each.minutes is not None]
        unknown = len(self._times) - len(known)
        again = sum(self._ledger.find(step)[0] == "done" for step in self._steps if step.name in self._times)
        lacking = sum(name in self._waiting for name in self._times)
        told = f"{len(self._times)} runs are left: {duration(60 * sum(known))}"
        told += f", and {unknown} of which nobody knows how long they take" if unknown else ""
        told += f"; {again} of them again, since what others need of them is not here" if again else ""
        return told + (f"; {lacking} of them when their data is there" if lacking else "")

    def _forecast(self, left: Sequence[Step]) -> dict[str, Minutes]:
        """How long each command that is left takes: as it took here before, or as the scale or `--check` says."""
        took, found = self._ledger.minutes(), {}
        for step in left:
            label = without_seed(step.label)
            found[step.name] = Minutes(took[label], "measured") if label in took else self._expect(step)
        return found

    def _expect(self, step: Step) -> Minutes:
        """How long a command takes by the scale, or a pre-training as it is planned on this machine."""
        scale = self._declared.scale
        said = scale.minutes.get(step.column if step.kind in ("tune", "pairs") else step.kind)
        if said is not None:
            said *= self._declared.restarts / scale.restarts if step.kind == "tune" else 1
            return Minutes(said, "as the scale says")
        words = (word for word in step.words if not word.startswith("{"))
        planned = planned_minutes(*words) if step.kind == "train" else None
        return Minutes(planned, "unknown" if planned is None else "as --check says, here")


@cache
def planned_minutes(*words: str) -> float | None:
    """The minutes of a pre-training on this machine, of the words of its command; None where nobody knows."""
    from pretraining.config.overrides import load_recipe
    from pretraining.training.preview import plan_run

    flags = parted(words)
    recipe, _ = flags.pop("--recipe")[0], flags.pop("--data")
    ranks = count_ranks(MOST_RANKS)
    with suppress(UserError):
        seconds = plan_run(load_recipe(Path(recipe), [*together(flags)], ranks=ranks), None, ranks).seconds
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
