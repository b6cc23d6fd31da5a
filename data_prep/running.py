"""Runs the tasks of a step that no earlier run has done, and keeps their records once their files are on the disk."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rich.console import Console

from data_prep.common.files import force, forced_later
from data_prep.common.launchers import mpi_size
from data_prep.common.progress import StepProgress
from data_prep.common.workers import Workers
from data_prep.work import Journal, Kind, Records, WorkFolder


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
    items: Callable[[Kind], int] = lambda _: 0
    """Counts the documents of a task, for the progress of the step."""
    after: Callable[[Task], None] = lambda _: None
    """Called with a task once its record is kept: it may delete what the task has consumed."""


def leave_to_keeper(function: Callable[[Task], Kind], task: Task) -> Kind:
    """Runs a task without forcing its files to the disk, which `RecordKeeper` does; under MPI the task does it."""
    if mpi_size() > 1:
        return function(task)
    with forced_later():
        return function(task)


class RecordKeeper(Generic[Task, Kind]):
    """Writes the records of tasks in a thread, as many at once as have come meanwhile.

    Forcing a file to the disk takes milliseconds, in which workers can do the next task. A record is written once the
    files of its task are on the disk; then `after` is called with the task.
    """

    def __init__(self, work: WorkFolder, journal: Journal[Kind], after: Callable[[Task], None]) -> None:
        self._work, self._journal, self._after = work, journal, after
        self._done = queue.SimpleQueue[tuple[Task, Kind]]()
        self._calls = deque[Future[None]]()
        self._thread = ThreadPoolExecutor(1)
        self.places: dict[str, int] = {}
        """Where the record of every task begins."""

    @contextmanager
    def start(self) -> Iterator[None]:
        """Keeps records as they come; in the end waits until all are kept, also where the run was interrupted."""
        with self._thread:
            yield
        self._raise_fault()

    def add(self, task: Task, record: Kind) -> None:
        """Has the record of a task kept; raises what went wrong with an earlier one."""
        self._raise_fault()
        self._done.put((task, record))
        self._calls.append(self._thread.submit(self._keep_done))

    def _raise_fault(self) -> None:
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()

    def _keep_done(self) -> None:
        """Keeps the records that have come, together; none where an earlier call has kept them."""
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        if done and mpi_size() == 1:  # opened anew: an error that the system forgot with its memory is not seen
            for _, record in done:
                for file in record.files:
                    force(self._work.out / file.path)
        if done:
            places = self._journal.add((task.name, record) for task, record in done)
            self.places.update(zip((task.name for task, _ in done), places, strict=True))
        for task, _ in done:
            self._after(task)


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
        places = dict(self.work.find_whole_tasks(step.name))
        total, done = 0, 0
        for task in tasks():
            total += task.weight
            done += task.weight if task.name in places else 0
        progress = StepProgress(self.console, step.name.replace("-", " "), step.unit, total, done)
        keeper = RecordKeeper[Task, Kind](self.work, journal, step.after)
        with progress.show(), keeper.start():
            waiting = (task for task in tasks() if task.name not in places)
            for task, record in self.workers.run(partial(leave_to_keeper, step.function), waiting):
                keeper.add(task, record)
                progress.advance(task.weight, step.items(record))
        places |= keeper.places
        self.work.finish(step.name)
        return Records(journal, tuple(places[task.name] for task in tasks()))
