"""Runs the tasks of a step: those that no earlier run has done, with a line that tells how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from rich.console import Console

from data_prep.common.progress import StepProgress
from data_prep.common.workers import Workers
from data_prep.keeping import Keeper, leave_to_keeper
from data_prep.work import Kind, Records, WorkFolder


class StepTask(Protocol):
    """Work that a worker can do by itself."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""

    @property
    def weight(self) -> int:
        """Says how much work the task is, for the progress of its step."""


Task = TypeVar("Task", bound=StepTask)


@dataclass(frozen=True)
class Step(Generic[Task, Kind]):
    """A step of a run, whose tasks workers do in any order."""

    name: str
    function: Callable[[Task], Kind]
    """Does a task."""
    kind: type[Kind]
    """What a task tells of its work."""
    unit: str
    """What the weights of tasks count."""
    items: Callable[[Kind], int] = lambda _: 0
    """Counts the documents of a task, for the progress of the step."""
    after: Callable[[Task], None] = lambda _: None
    """Called with a task once its record is kept: it may delete what the task has consumed."""

    def called(self, name: str) -> Step[Task, Kind]:
        """Gives the step by another name, where it is done several times in a run."""
        return replace(self, name=name)


@dataclass(frozen=True)
class Runner:
    """Does the tasks of the steps of a run, one step after another."""

    work: WorkFolder
    workers: Workers
    console: Console

    def run(self, step: Step[Task, Kind], tasks: Callable[[], Iterable[Task]]) -> Records[Kind]:
        """Runs the tasks of a step that are not done yet; returns the records of all in the order of the tasks.

        `tasks` makes the tasks anew whenever it is called, so that they are never in memory together.
        """
        journal = self.work.journal(step.name, step.kind)
        if self.work.is_finished(step.name):
            places = {task: place for task, place, _ in journal.read()}
            if all(task.name in places for task in tasks()):
                return Records(journal, tuple(places[task.name] for task in tasks()))
            self.work.reopen(step.name)  # a record that was not on the disk yet when the machine lost its power
        journal.repair()
        places = dict(self.work.whole(step.name))
        total, done = 0, 0
        for task in tasks():
            total += task.weight
            done += task.weight if task.name in places else 0
        progress = StepProgress(self.console, step.name.replace("-", " "), step.unit, total, done)
        keeper = Keeper[Task, Kind](self.work, journal, step.after)
        with progress.show(), keeper:
            waiting = (task for task in tasks() if task.name not in places)
            for task, record in self.workers.run(partial(leave_to_keeper, step.function), waiting):
                keeper.add(task, record)
                progress.advance(task.weight, step.items(record))
        places |= keeper.places
        self.work.finish(step.name)
        return Records(journal, tuple(places[task.name] for task in tasks()))
