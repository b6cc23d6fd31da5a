"""GLUE's averages of the best runs' dev scores; None where a task is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from finetuning.files.splits import FOLDERS
from finetuning.results import TaskResult

WITHOUT = "wnli"
"""The task that the paper leaves out, whose dev split misleads."""
PAPER = {"mrpc": "f1", "qqp": "f1", "stsb": "spearman"}
"""Figures of the paper's table that differ from the metric by which runs are compared."""
HALVES = {"mnli": 2}
"""Number of scored splits of the tasks that have more than one."""


class TaskAverage(NamedTuple):
    """An average, and the tasks it lacks."""

    name: str
    score: float | None
    chance: float | None
    """Standard error, propagated from the tasks; None where one of theirs is unknown."""
    missing: tuple[str, ...]
    """Tasks without a score on all their splits."""


def compute_averages(results: Mapping[str, TaskResult]) -> list[TaskAverage]:
    """Computes the leaderboard's average, in which every task weighs the same; the same without WNLI; and the paper's
    (Table 1): no WNLI, both halves of MNLI as columns, F1 for MRPC and QQP, and Spearman for STS-B."""
    eight = tuple(name for name in FOLDERS if name != WITHOUT)
    return [
        _average("average", results, tuple(FOLDERS)),
        _average(f"average without {WITHOUT}", results, eight),
        _average("average as in the paper", results, eight, as_in_paper=True),
    ]


def collect_averages(results: Mapping[str, TaskResult]) -> dict[str, float]:
    """Returns the averages that lack no task, by name."""
    return {each.name: each.score for each in compute_averages(results) if each.score is not None}


def _average(
    name: str, results: Mapping[str, TaskResult], tasks: tuple[str, ...], as_in_paper: bool = False
) -> TaskAverage:
    """Averages the figures of all splits of these tasks: each task weighs the same or, as in the paper, each split."""
    scored = {task: result for task, result in results.items() if result.score is not None}
    missing = tuple(task for task in tasks if task not in scored or len(scored[task].scores) < HALVES.get(task, 1))
    if missing:
        return TaskAverage(name, None, None, missing)
    rows = []
    for task in tasks:
        result = scored[task]
        figure = PAPER.get(task, result.metric) if as_in_paper else result.metric
        weight = 1.0 if as_in_paper else 1 / len(result.scores)
        for split, figures in result.scores.items():
            spread = result.get_spread(split, figure)
            rows.append((weight, weight * figures[figure], math.nan if spread is None else weight * spread))
    weights, values, spreads = zip(*rows, strict=True)
    chance = math.hypot(*spreads) / sum(weights)
    return TaskAverage(name, sum(values) / sum(weights), None if math.isnan(chance) else chance, ())
