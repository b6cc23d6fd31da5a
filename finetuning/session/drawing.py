"""Draws what came of a task beside its results.json. What cannot be drawn is told, and stops nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetuning.results import PREDICTIONS, TaskResult
from finetuning.session import charts
from finetuning.session.look import measure
from finetuning.tasks.task import Task
from pretraining.reporting.figures import save
from pretraining.reporting.metrics_file import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(task: Task, folder: Path, result: TaskResult) -> list[str]:
    """Draws the charts of a task; returns lines on those that could not be drawn."""
    warnings = []
    for name, make in _charts(task, folder, result):
        try:
            if (figure := make()) is not None:
                save(figure, folder / f"{name}.png")
        except Exception as error:  # a font, a full disk, a broken Matplotlib: the scores are worth more than charts
            warnings.append(f"{folder / name}.png: not drawn: {type(error).__name__}: {error}")
    return warnings


def _charts(task: Task, folder: Path, result: TaskResult) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
    """The names of the charts that there can be, and how each is drawn."""
    runs, best, metric = result.runs, result.best, result.metric
    if metrics := {name: folder / name / METRICS for name in runs if (folder / name / METRICS).exists()}:
        yield "curves", lambda: charts.curves(metrics, best, metric, task.name)
    if len(metrics) > 1:
        shown, items = {name: runs[name] for name in metrics}, len(next(iter(task.dev.values())))
        yield "grid", partial(charts.grid, shown, best, f"{task.name}: {metric}", items)
    if metrics:
        yield "lengths", partial(_lengths, task)
    for split in task.dev if best is not None else ():
        yield f"answers_{split}", partial(_answers, task, folder / PREDICTIONS, split)
        if found := result.classes.get(split):
            classes = {name: found[name] for name in (*task.head.labels, *found) if name in found}  # in their order
            yield f"classes_{split}", partial(charts.by_class, classes, f"{task.name}, {split}")


def _lengths(task: Task) -> Figure | None:
    """How long the training items are; None where none of them is longer than a model is given."""
    measured = list(measure(task.seen("train")))
    if not any((each.pieces > each.lengths.limit).any() for each in measured):
        return None
    return charts.lengths(measured, f"{task.name}, train")


def _answers(task: Task, predictions: Path, split: str) -> Figure | None:
    """What the best run says of a split, against what is right; None where the task has no picture of that."""
    if (compared := task.compared(split, predictions)) is None:
        return None
    title = f"{task.name}, {split}"
    if compared.names:
        return charts.confusion(compared.right, compared.said, compared.names, title)
    return charts.scatter(compared.right, compared.said, title)
