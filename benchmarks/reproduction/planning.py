"""What a table takes: its runs, how long they are and how that is known, and what is there already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from benchmarks.reproduction.ledger import Ledger, Minutes
from benchmarks.reproduction.running import count_ranks
from benchmarks.reproduction.steps import Step, parted, together
from benchmarks.tables import ResultTable
from data_prep.common.errors import UserError
from data_prep.common.progress import duration

MOST_RANKS = 8
"""Processes of a pre-training on CPUs, for which it is planned, where there are so many cores."""


def plan_table(title: str, steps: Sequence[Step], left: Sequence[Step], ledger: Ledger) -> ResultTable:
    """All runs of a table, with those that are left to do and how long they take."""
    names = {step.name for step in left}
    rows = []
    for step in steps:
        standing, outcome = ledger.find(step)
        took = duration(outcome.seconds) if outcome else ""
        left_for, how = minutes_of(step, ledger) if step.name in names else (None, "")
        time = duration(60 * left_for) if left_for is not None else took
        rows.append([step.kind, step.label, standing, time, how or ("took" if took else ""), step.name])
    return ResultTable(title, ["", "run", "", "time", "", "folder"], rows)


def minutes_of(step: Step, ledger: Ledger) -> Minutes:
    """How long a command takes: as the ledger knows, or as a pre-training is planned on this machine."""
    known = ledger.minutes(step)
    if known.minutes is not None or step.kind != "train":
        return known
    planned = planned_minutes(*(word for word in step.words if not word.startswith("{")))
    return known if planned is None else Minutes(planned, "as --check says, here")


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


def total(left: Sequence[Step], ledger: Ledger) -> str:
    """How long all runs take that are left."""
    minutes = [minutes_of(step, ledger).minutes for step in left]
    unknown = sum(each is None for each in minutes)
    known = duration(60 * sum(each for each in minutes if each is not None))
    others = f", and {unknown} of which nobody knows how long they take" if unknown else ""
    return f"{len(left)} runs are left: {known}{others}"


def read_share(text: str) -> tuple[int, int] | None:
    """The part of the list that this command runs, as `2/4` says it; None where it runs all."""
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not found or int(found[1]) > int(found[2]):
        raise UserError(f"--share {text}: give I/N, such as 2/4: the second of four parts")
    return int(found[1]), int(found[2])
