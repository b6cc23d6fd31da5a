"""What a table takes: its runs, how long they are and how that is known, and what is there already."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.reproduction.ledger import Ledger
from benchmarks.reproduction.running import count_ranks
from benchmarks.reproduction.steps import Step, parted, together
from benchmarks.tables import ResultTable
from data_prep.common.errors import UserError
from data_prep.common.progress import duration

MOST_RANKS = 8
"""Processes of a pre-training on CPUs, for which it is planned, where there are so many cores."""
USED = ("done", "kept")
"""How runs stand whose results are used, which are made again only for what others need of them."""


class Minutes(NamedTuple):
    """How long a command takes, and how that is known."""

    minutes: float | None
    source: str


def plan_table(
    title: str, steps: Sequence[Step], left: Sequence[Step], waiting: Collection[str], ledger: Ledger
) -> ResultTable:
    """All runs of a table, with those that are left to do and how long they take; `waiting` lack their data."""
    times, rows = reckon(steps, left, ledger), []
    for step in steps:
        standing, outcome = ledger.find(step)
        took = duration(outcome.seconds) if outcome else ""
        left_for, how = times.get(step.name, (None, ""))
        time = duration(60 * left_for) if left_for is not None else took
        note = ", again" if step.name in times and standing in USED else ""
        note += ", no data" if step.name in times and step.name in waiting else ""
        rows.append([step.kind, step.label, standing + note, time, how or ("took" if took else ""), step.name])
    return ResultTable(title, ["", "run", "", "time", "", "folder"], rows)


def reckon(steps: Iterable[Step], left: Iterable[Step], ledger: Ledger) -> dict[str, Minutes]:
    """How long each command takes that is left: as it took here, or as the scale or `--check` says, times what the
    commands of its kind that were measured took of that."""
    ratios = defaultdict(list)
    for step in steps:
        took = ledger.measured(step)
        if took and (said := expect(step, ledger).minutes):
            ratios[step.kind].append(took / said)
    found = {}
    for step in left:
        took, (said, source) = ledger.measured(step), expect(step, ledger)
        if took is not None:
            said, source = took, "measured"
        elif said is not None and ratios[step.kind]:
            pace = median(ratios[step.kind])
            said, source = pace * said, f"{source}, x {pace:.2g}"
        found[step.name] = Minutes(said, source)
    return found


def expect(step: Step, ledger: Ledger) -> Minutes:
    """How long a command takes by the scale, or a pre-training as it is planned on this machine."""
    if (said := ledger.said(step)) is not None:
        return Minutes(said, "as the scale says")
    planned = (
        planned_minutes(*(word for word in step.words if not word.startswith("{"))) if step.kind == "train" else None
    )
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


def total(steps: Iterable[Step], left: Sequence[Step], waiting: Collection[str], ledger: Ledger) -> str:
    """How long all runs take that are left, which are made again, and which wait for data."""
    minutes = [each for each, _ in reckon(steps, left, ledger).values()]
    unknown = sum(each is None for each in minutes)
    known = duration(60 * sum(each for each in minutes if each is not None))
    again = sum(ledger.find(step)[0] in USED for step in left)
    lacking = sum(step.name in waiting for step in left)
    others = f", and {unknown} of which nobody knows how long they take" if unknown else ""
    others += (
        f"; {again} of them again, since what others need of them, or they are made from, is not here" if again else ""
    )
    others += f"; {lacking} of them when their data is there" if lacking else ""
    return f"{len(left)} runs are left: {known}{others}"


def read_share(text: str) -> tuple[int, int] | None:
    """The part of the list that this command runs, as `2/4` says it; None where it runs all."""
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not found or int(found[1]) > int(found[2]):
        raise UserError(f"--share {text}: give I/N, such as 2/4: the second of four parts")
    return int(found[1]), int(found[2])
