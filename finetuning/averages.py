"""The averages of GLUE: of what the best runs of its tasks score on dev, or None where one of the tasks is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from finetuning.files.splits import FOLDERS
from finetuning.results import TaskResult

WITHOUT = "wnli"
"""The task that the paper leaves out, whose dev split misleads."""
PAPER = {"mrpc": "f1", "qqp": "f1", "stsb": "spearman"}
"""The figures of the paper's table where they are not those by which runs are compared."""
HALVES = {"mnli": 2}
"""How many splits a task is scored on, where it is not one."""


class Average(NamedTuple):
    """An average, and what it lacks."""

    name: str
    score: float | None
    chance: float | None
    """The standard error that follows from those of the tasks; None where one of these is not known."""
    missing: tuple[str, ...]
    """Tasks without a score on all their splits."""


class Column(NamedTuple):
    """A figure of a split, and how much it weighs in an average."""

    weight: float
    value: float
    spread: float | None


def averages(results: Mapping[str, TaskResult]) -> list[Average]:
    """The averages of GLUE: the leaderboard's, in which every task weighs the same; that without WNLI; and the paper's
    (Table 1), which has no WNLI either, both halves of MNLI as columns, F1 for MRPC and QQP, and Spearman for STS-B."""
    eight = tuple(name for name in FOLDERS if name != WITHOUT)
    return [
        _average("average", results, tuple(FOLDERS)),
        _average(f"average without {WITHOUT}", results, eight),
        _average("average as in the paper", results, eight, as_in_paper=True),
    ]


def known_averages(results: Mapping[str, TaskResult]) -> dict[str, float]:
    """The averages that there are, by their names."""
    return {each.name: each.score for each in averages(results) if each.score is not None}


def _average(
    name: str, results: Mapping[str, TaskResult], tasks: tuple[str, ...], as_in_paper: bool = False
) -> Average:
    missing = tuple(task for task in tasks if task not in results or not _is_whole(task, results[task]))
    if missing:
        return Average(name, None, None, missing)
    columns = [column for task in tasks for column in _columns(task, results[task], as_in_paper)]
    total = sum(column.weight for column in columns)
    score = sum(column.weight * column.value for column in columns) / total
    spreads = [column.weight * column.spread for column in columns if column.spread is not None]
    return Average(name, score, math.hypot(*spreads) / total if len(spreads) == len(columns) else None, ())


def _is_whole(task: str, result: TaskResult) -> bool:
    return result.score is not None and len(result.scores) >= HALVES.get(task, 1)


def _columns(task: str, result: TaskResult, as_in_paper: bool) -> Iterator[Column]:
    """The figures of a task, one for each split."""
    figure = PAPER.get(task, result.metric) if as_in_paper else result.metric
    for split, figures in result.scores.items():
        weight = 1.0 if as_in_paper else 1 / len(result.scores)
        yield Column(weight, figures[figure], result.spread_of(split, figure))
