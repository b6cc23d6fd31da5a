"""Hands out work: to this process, to several processes of this machine, or to the ranks of an MPI job.

All three are executors of `concurrent.futures`, so there is one path through the code. Under `mpirun -n N` or `srun`
rank 0 hands out the work and writes to the terminal, and the other ranks do the work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar, cast

from data_prep.common.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 4  # tasks handed out for each worker, so that none waits


def mpi_size() -> int:
    """Counts the ranks that a launcher such as mpirun started; without a launcher there is one."""
    return _number_from_launcher(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"), 1)


def mpi_rank() -> int:
    """Numbers this process among the ranks that a launcher such as mpirun started; without a launcher it is rank 0."""
    return _number_from_launcher(("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"), 0) if mpi_size() > 1 else 0


def _number_from_launcher(names: tuple[str, ...], default: int) -> int:
    """Reads the first of some environment variables that is set: every launcher has a name of its own."""
    return int(next((os.environ[name] for name in names if name in os.environ), default))


def num_cores() -> int:
    """Counts the cores that this process may use, by its affinity, which Slurm sets, and its quota in a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no quota
        return cores


class Workers:
    """Runs tasks, in this process or in others, and yields their results as they come."""

    def __init__(self, executor: Executor | None, size: int) -> None:
        self._executor, self.size = executor, size

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Yields tasks with their results, in the order in which they finish."""
        if self._executor is None:
            for task in tasks:
                yield task, function(task)
            return
        waiting: dict[Future[Result], Task] = {}
        try:
            for task in tasks:
                waiting[self._executor.submit(function, task)] = task
                if len(waiting) >= self.size * AHEAD:
                    yield from self._finished(waiting)
            while waiting:
                yield from self._finished(waiting)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed from outside, often because memory ran out\n"
                "run the same command again to continue where it stopped (fewer --workers need less memory)"
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    @staticmethod
    def _finished(waiting: dict[Future[Any], Any]) -> Iterator[tuple[Any, Any]]:
        """Waits until some tasks are finished, and takes them out of those that wait."""
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            yield waiting.pop(future), future.result()


@contextmanager
def open_workers(size: int, preload: str) -> Iterator[Workers | None]:
    """Starts the workers of this machine or MPI job.

    Yields None on the ranks of an MPI job that are workers themselves, when all is done. Processes of this machine
    are forked from one that has loaded the module `preload`, so that they begin at once.
    """
    if mpi_size() > 1:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor

        if MPI.COMM_WORLD.Get_size() != mpi_size():
            raise UserError(
                f"the launcher started {mpi_size()} processes, but MPI connects {MPI.COMM_WORLD.Get_size()} of them\n"
                "under Slurm: srun --mpi=pmix (srun --mpi=list shows what there is)"
            )
        _quiet()
        with MPICommExecutor() as executor:
            yield None if executor is None else Workers(cast(Executor, executor), mpi_size() - 1)
    elif size == 1:
        _quiet()
        yield Workers(None, 1)
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
        with ProcessPoolExecutor(size, context, _start_worker) as executor:
            try:
                yield Workers(executor, size)
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise


def _start_worker() -> None:
    """Prepares a worker process, so that it ends with the main process and by nothing else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    threading.Thread(target=_end_with_main, daemon=True).start()
    _quiet()


def _end_with_main() -> None:
    """Ends this worker when the main process is gone, however it went: nobody would take its results."""
    main = multiprocessing.parent_process()
    assert main is not None
    connection.wait([main.sentinel])
    os._exit(1)


def _quiet() -> None:
    """Keeps libraries from starting threads of their own, since there is a worker for every core already."""
    import pyarrow

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pyarrow.set_cpu_count(1)


def silence_other_ranks() -> None:
    """Silences all ranks but the first, so that a message appears once."""
    if mpi_rank() > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
