"""Runs the tasks of a step that no earlier run has done, and keeps their records once their files are on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rich.console import Console

from data_prep.common.progress import StepProgress
from data_prep.common.workers import Workers
from data_prep.work import Kind, Records, WorkFolder


class StepTask(Protocol):
    """Work that a worker can do by itself."""

    @property
    def name(self) -> str:
        """Identifies the task within its step."""

    @property
    def weight(self) -> int:
        """The size of the task, for the progress of its step."""


@dataclass(frozen=True)
class NumberedTask:
    """Asks a worker for one part of a step: a file, a range of keys or the like, which has a number."""

    folder: Path
    """The output folder."""
    number: int
    """The number of the part."""
    weight: int
    """How much work it is: pieces, keys or documents, by the step."""

    @property
    def name(self) -> str:
        """Returns the number as text: it tells the tasks of a step apart."""
        return f"{self.number:07}"


Task = TypeVar("Task", bound=StepTask)


@dataclass(frozen=True)
class Step(Generic[Task, Kind]):
    """A step of a run, whose tasks workers do in any order."""

    name: str
    function: Callable[[Task], Kind]
    """Does a task."""
    kind: type[Kind]
    """The class of the records of tasks."""
    unit: str
    """The unit of the weights of tasks."""
    after: Callable[[Task], None] = lambda _: None
    """Called with a task once its record is kept: it may delete what the task has consumed."""


@dataclass(frozen=True)
class Runner:
    """Does the tasks of the steps of a run, one step after another."""

    work: WorkFolder
    workers: Workers
    console: Console
    seconds: dict[str, float] = field(default_factory=dict)
    """What each step took."""

    def run(self, step: Step[Task, Kind], tasks: Callable[[], Iterable[Task]]) -> Records[Kind]:
        """Runs the tasks of a step that are not done yet; returns the records of all in the order of the tasks.

        `tasks` makes the tasks anew whenever it is called, so that they are never in memory together.
        """
        start, journal = time.perf_counter(), self.work.journal(step.name, step.kind)
        if self.work.is_finished(step.name):
            places = {task: place for task, place, _ in journal.read()}
            if all(task.name in places for task in tasks()):
                return Records(journal, tuple(places[task.name] for task in tasks()))
            self.work.reopen(step.name)  # a record that was not on the disk yet when the machine lost its power
        journal.repair()
        places = dict(self.work.find_whole_tasks(step.name))
        total, done = 0, 0
        for task in tasks():
            total += task.weight
            done += task.weight if task.name in places else 0
        progress = StepProgress(self.console, step.name.replace("-", " "), step.unit, total, done)
        with progress.show():
            waiting = (task for task in tasks() if task.name not in places)
            for done_together in self.workers.run(step.function, waiting):
                begins = journal.add((task.name, record) for task, record in done_together)
                for (task, _), begin in zip(done_together, begins, strict=True):
                    places[task.name] = begin
                    step.after(task)
                    progress.advance(task.weight)
        self.work.finish(step.name)
        self.seconds[step.name] = time.perf_counter() - start
        return Records(journal, tuple(places[task.name] for task in tasks()))
