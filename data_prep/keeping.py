"""Keeps what tasks have done, while others are at work: first their files, then their records are on the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from data_prep.common.files import force, forced_later
from data_prep.common.launchers import mpi_size
from data_prep.work import Journal, Kind, WorkFolder


class Named(Protocol):
    """A task, as far as its record needs it."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""


Task = TypeVar("Task", bound=Named)


def leave_to_keeper(function: Callable[[Task], Kind], task: Task) -> Kind:
    """Does a task without waiting for the disk, which `Keeper` does; on another machine it waits itself."""
    if mpi_size() > 1:
        return function(task)
    with forced_later():
        return function(task)


class Keeper(Generic[Task, Kind]):
    """Keeps the records of tasks in a thread of its own, as many at once as have come meanwhile.

    A disk takes milliseconds to say that it has a file, in which workers can do the next task. A record is kept once
    the files of its task are on the disk, and `after` is called with a task once its record is.
    """

    def __init__(self, work: WorkFolder, journal: Journal[Kind], after: Callable[[Task], None]) -> None:
        self._work, self._journal, self._after = work, journal, after
        self._done = queue.SimpleQueue[tuple[Task, Kind] | None]()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._keep_all, daemon=True)
        self.places: dict[str, int] = {}
        """Where the record of every task begins."""

    def __enter__(self) -> Keeper[Task, Kind]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until all is kept, also where the run was interrupted."""
        self._done.put(None)
        self._thread.join()
        if error is None:
            self._raise_fault()

    def add(self, task: Task, record: Kind) -> None:
        """Has the record of a task kept; raises what went wrong with an earlier one."""
        self._raise_fault()
        self._done.put((task, record))

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _keep_all(self) -> None:
        """Keeps what comes until there is no more, or something goes wrong."""
        more = True
        try:
            while more:
                waiting = [self._done.get()]
                while not self._done.empty():
                    waiting.append(self._done.get())
                more = None not in waiting
                self._keep([done for done in waiting if done is not None])
        except BaseException as fault:
            self._fault = fault

    def _keep(self, done: list[tuple[Task, Kind]]) -> None:
        """Keeps some records together."""
        if not done:
            return
        if mpi_size() == 1:  # the file is opened anew: an error that the system forgot with its memory is not seen
            for _, record in done:
                for file in record.files:
                    force(self._work.out / file.path)
        places = self._journal.add((task.name, record) for task, record in done)
        self.places.update(zip((task.name for task, _ in done), places, strict=True))
        for task, _ in done:
            self._after(task)
