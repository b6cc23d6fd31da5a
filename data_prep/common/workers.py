"""Hands out work: to this process, to several processes of this machine, or to the ranks of an MPI job.

All three are executors of `concurrent.futures`, so there is one path through the code. Under `mpirun -n N` or `srun`
rank 0 hands out the work and writes to the terminal, and has a worker process of its own beside the other ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import TypeVar

from data_prep.common.beginning import ROOT
from data_prep.common.errors import UserError
from data_prep.common.launchers import mpi_size
from data_prep.common.ranks import Meeting, on_rank, serving_ranks
from data_prep.common.supervision import FEWER, OUT_OF_MEMORY, end_with_parent, send_signal

Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 4  # tasks handed out for each worker, so that none waits
SILENCE = "ignore::UserWarning:multiprocessing.resource_tracker"
OWN_AHEAD = 2  # for the worker of the first rank: no other rank can take what waits for it at the end


class Workers:
    """Runs tasks, in this process or in others, and yields their results as they come."""

    def __init__(self, lanes: Sequence[Lane] = (), meeting: Meeting | None = None) -> None:
        """Takes the executors that do the work (none: this process does it), and the other ranks of an MPI job."""
        self._lanes, self._meeting = lanes, meeting

    def share(self, work: Path) -> None:
        """Raises UserError unless all ranks of an MPI job see the work folder; call it once, before any work."""
        if self._meeting is not None:
            self._meeting.share(work)

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[list[tuple[Task, Result]]]:
        """Yields tasks with their results, in the order in which they finish: those that have finished meanwhile."""
        if not self._lanes:
            for task in tasks:
                yield [(task, function(task))]
            return
        waiting: dict[Future[Result], tuple[Task, Lane]] = {}
        call = function if self._meeting is None else partial(on_rank, function)
        self._note_busy(True)
        try:
            for task in tasks:
                lane = min(self._lanes, key=lambda lane: lane.waiting / lane.room)
                lane.waiting += 1
                waiting[lane.executor.submit(call, task)] = task, lane
                if all(lane.waiting >= lane.room for lane in self._lanes):
                    yield _take_finished(waiting)
            while waiting:
                yield _take_finished(waiting)
            self._note_busy(False)
        except BrokenProcessPool as error:
            raise UserError(f"a worker process was killed from outside, {OUT_OF_MEMORY}\n{FEWER}") from error
        finally:
            for future in waiting:
                future.cancel()

    def _note_busy(self, is_busy: bool) -> None:
        if self._meeting is not None:
            self._meeting.is_busy = is_busy


def _take_finished(waiting: dict[Future[Result], tuple[Task, Lane]]) -> list[tuple[Task, Result]]:
    """Waits until some tasks are finished, and takes them out of those that wait."""
    finished = []
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        task, lane = waiting.pop(future)
        lane.waiting -= 1
        finished.append((task, future.result()))
    return finished


@dataclass
class Lane:
    """One of the executors that tasks are handed to."""

    executor: Executor
    room: int
    """How many tasks are handed out at a time."""
    waiting: int = 0


@contextmanager
def open_workers(size: int, preload: str, work: Path | None = None) -> Iterator[Workers | None]:
    """Starts the workers of this machine or MPI job.

    Yields None on the ranks of an MPI job other than the first, when all is done. Processes of this machine are forked
    from one that has loaded the module `preload`, so that they begin at once. `work` is the folder in which the ranks
    of a job are going to hear of one another.
    """
    if mpi_size() > 1:
        _limit_threads()
        with serving_ranks(work or Path.cwd()) as meeting:
            if meeting is None:
                yield None
                return
            with _processes(1, preload) as executor:  # the first rank does its share of the work too
                lanes = [Lane(meeting.executor, (mpi_size() - 1) * AHEAD), Lane(executor, OWN_AHEAD)]
                yield Workers(lanes, meeting)
    elif size == 1:
        _limit_threads()
        yield Workers()
    else:
        with _processes(size, preload) as executor:
            yield Workers([Lane(executor, size * AHEAD)])


@contextmanager
def _processes(size: int, preload: str) -> Iterator[Executor]:
    """Opens worker processes of this machine."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    _start_helpers()
    with ProcessPoolExecutor(size, context, _start_worker) as executor:
        try:
            yield executor
        except BaseException:
            _end_server()
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def _start_helpers() -> None:
    """Starts the processes of multiprocessing that fork workers and remove what this one leaves.

    Neither of them says anything when Ctrl-C ends them, or this process, in the midst of something.
    """
    here, warnings = Path.cwd(), os.environ.get("PYTHONWARNINGS", "")
    if SILENCE not in warnings:
        os.environ["PYTHONWARNINGS"] = f"{warnings},{SILENCE}"
    try:
        os.chdir(ROOT)  # where they find modules first, and must not find others of the same names
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as processes that are started here inherit
        forkserver.ensure_running()
    finally:
        os.chdir(here)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_server() -> None:
    """Ends the process that forks workers, so that none begins while this process ends, and would stumble over that."""
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if server is not None:
        threading.excepthook = lambda _: None  # the executor's thread would stumble over that in turn
        send_signal(server, signal.SIGKILL)
        time.sleep(0.05)  # a worker that it has just forked begins


def _start_worker() -> None:
    """Prepares a worker process, so that it ends with the main process and by nothing else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    end_with_parent(signal.SIGKILL, os.getppid())  # the server that forks workers
    threading.Thread(target=_end_with_main, daemon=True).start()
    _limit_threads()


def _end_with_main() -> None:
    """Ends this worker when the main process is gone, however it went: while workers live, so does their server."""
    main = multiprocessing.parent_process()
    assert main is not None
    connection.wait([main.sentinel])
    os._exit(1)


def _limit_threads() -> None:
    """Keeps libraries from starting threads of their own, since there is a worker for every core already."""
    import pyarrow

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pyarrow.set_cpu_count(1)
