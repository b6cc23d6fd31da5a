"""Runs the tasks of a step: those that no earlier run has done, with a line that tells how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from data_prep.common.progress import StepProgress
from data_prep.common.workers import Workers
from data_prep.work import Record, Records, WorkFolder


class StepTask(Protocol):
    """A piece of work that a worker can do by itself."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""

    @property
    def weight(self) -> int:
        """Says how much work the task is, for the progress of its step."""


@dataclass(frozen=True)
class Runner:
    """Does the tasks of the steps of a run, one step after another."""

    work: WorkFolder
    workers: Workers
    console: Console

    def run(
        self,
        step: str,
        function: Callable[[Any], Record],
        tasks: Callable[[], Iterable[StepTask]],
        unit: str,
        items: Callable[[Record], int] = lambda _: 0,
        after: Callable[[Any], None] = lambda _: None,
    ) -> Records:
        """Runs the tasks of a step that are not done yet; returns the records of all in the order of the tasks.

        `tasks` makes the tasks anew whenever it is called, so that they are never in memory together. `after` is
        called with a task once its record is kept, where it may delete what the task has consumed.
        """
        journal = self.work.journal(step)
        if self.work.is_finished(step):
            places = {task: place for task, place, _ in journal.read()}
            if all(task.name in places for task in tasks()):
                return Records(journal.path, tuple(places[task.name] for task in tasks()))
            self.work.reopen(step)  # a record that was not on the disk yet when the machine lost its power
        places = dict(self.work.whole(step))
        total, done = 0, 0
        for task in tasks():
            total += task.weight
            done += task.weight if task.name in places else 0
        progress = StepProgress(self.console, step.replace("-", " "), unit, total, done)
        try:
            with progress.shown():
                waiting = (task for task in tasks() if task.name not in places)
                for task, record in self.workers.run(function, waiting):
                    places[task.name] = journal.add(task.name, record)
                    after(task)
                    progress.advance(task.weight, items(record))
        finally:
            journal.close()
        self.work.finish(step)
        return Records(journal.path, tuple(places[task.name] for task in tasks()))
