"""What a table takes: its runs, how long they are and how that is known, and what is there already."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.reproduction.ledger import Ledger
from benchmarks.reproduction.steps import Step
from benchmarks.tables import ResultTable
from data_prep.common.errors import UserError
from data_prep.common.progress import duration


def plan_table(title: str, steps: Sequence[Step], left: Sequence[Step], ledger: Ledger) -> ResultTable:
    """All runs of a table, with those that are left to do and how long they take."""
    names = {step.name for step in left}
    rows = []
    for step in steps:
        standing, outcome = ledger.find(step)
        took = duration(outcome.seconds) if outcome else ""
        left_for, how = ledger.minutes(step) if step.name in names else (None, "")
        time = duration(60 * left_for) if left_for is not None else took
        rows.append([step.kind, step.label, standing, time, how or ("took" if took else ""), step.name])
    return ResultTable(title, ["", "run", "", "time", "", "folder"], rows)


def total(left: Sequence[Step], ledger: Ledger) -> str:
    """How long all runs take that are left."""
    minutes = [ledger.minutes(step).minutes for step in left]
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
