"""The ranks of an MPI job: how they meet, and how the tasks of rank 0 reach the others.

MPI carries tasks and results. What becomes of ranks is told beside it (heartbeats.py), since MPI waits for ever for one
that is gone. Rank 0 tells what is the same on all ranks; what goes wrong on another rank that one says, with its name.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from data_prep.common.codes import Code
from data_prep.common.errors import UserError, name_ranks
from data_prep.common.heartbeats import read_rank, tell_supervisor
from data_prep.common.launchers import mpi_rank, mpi_size, name_this_rank

Task = TypeVar("Task")
Result = TypeVar("Result")

PATIENCE = 10.0
"""Seconds in which all hosts must see a file that rank 0 writes, which on network file systems takes a while."""
LAST = 1.0
"""Seconds for which a rank without a fault of its own stays: mpirun ends all as soon as the first of them fails."""
LATER = 5.0
"""Seconds after which a rank tells by itself what rank 0 has not told for it."""
RANKS = "ranks"
"""The folder in the work folder by which ranks hear of one another."""
CURE = "give --out a folder that all hosts share, by its full path"

_met = False
"""Whether the ranks have met, so that none waits for this one in vain where it fails."""


def attempt_together(attempt: Callable[[], Result]) -> Result:
    """Has every rank attempt something, rank 0 first; where any of them fails, that one says so and all end."""
    if mpi_size() == 1:
        return attempt()
    for turn in (0, 1):
        code: int | None = None
        text = ""
        if min(mpi_rank(), 1) == turn:
            try:
                result = attempt()
            except UserError as error:
                code, text = Code.CURE, f"error: {name_this_rank()}{error}"
            except SystemExit as error:  # which has told
                code = error.code if isinstance(error.code, int) else Code.CURE
            except Exception:
                code, text = Code.MISTAKE, f"{name_this_rank()}{traceback.format_exc()}"
        _meet(code, text)
    return result


def _meet(code: int | None, text: str) -> None:
    """Meets the other ranks; ends this one if it has an exit code, whose reason it tells, or another has.

    Where rank 0 has a reason too, it is mostly the same: the others tell none.
    """
    global _met
    codes = _connect().allgather(code)
    _met = True
    if text and (mpi_rank() == 0 or codes[0] is None):
        _say(text)
    if code is not None:
        raise SystemExit(code)
    if others := [other for other in codes if other is not None]:
        _end_later(others[0])


def _end_later(code: int) -> NoReturn:
    """Ends this rank with the exit code of one that has a fault, which may still be telling it."""
    time.sleep(LAST)
    raise SystemExit(code)


def _connect() -> Any:
    """Connects the ranks; raises UserError where MPI is missing, or does not connect all that the launcher started."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # a RuntimeError where there is no library of MPI
        raise _alone(
            f"{mpi_size()} processes were started, which cannot meet: {sys.executable}: {error}\n"
            "python -m pip install -e '.[mpi]' brings mpi4py and Open MPI; one process without mpirun or srun needs "
            "neither, and uses all cores of its machine"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != mpi_size():
        raise _alone(
            f"the launcher started {mpi_size()} processes, but MPI connects {comm.Get_size()} of them\n"
            "under Slurm: srun --mpi=pmix (srun --mpi=list shows what there is)"
        )
    return comm


def _alone(fault: str) -> UserError:
    """The error of a rank that did not meet the others, which rank 0 tells first, where it has the same."""
    if mpi_rank():
        time.sleep(LATER)
    return UserError(f"{name_this_rank()}{fault}")


def tell_fault(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tells of an exception that nothing else has told of, as `sys.excepthook`, and ends ranks that wait here."""
    text = name_this_rank() + "".join(traceback.format_exception(kind, error, trace))
    if _met:
        return _say(text)
    try:
        _meet(Code.MISTAKE, text)
    except UserError as fault:
        _say(f"{text}and MPI: {fault}")
    except SystemExit:
        return None


def _say(text: str) -> None:
    print(text.rstrip(), file=sys.stderr, flush=True)


def on_rank(function: Callable[[Task], Result], task: Task) -> Result:
    """Does a task of rank 0 on another rank; a fault of the code is told with the rank and its host."""
    try:
        return function(task)
    except UserError:
        raise
    except Exception:
        raise RankError(f"{name_this_rank()}\n{traceback.format_exc()}") from None


class RankError(Exception):
    """A fault of the code on a rank, whose message has its traceback."""


@contextmanager
def serving_ranks(work: Path) -> Iterator[Meeting | None]:
    """Yields the meeting through which rank 0 hands out work; on other ranks None, once all work is done.

    `work` is the folder in which ranks are to hear of one another, as the user of rank 0 has named it.
    When rank 0 fails while others may be busy, nothing is waited for: those that watch over the ranks end them.
    """
    comm = _connect()
    from mpi4py.futures import MPICommExecutor

    token, given = comm.bcast((secrets.token_hex(8), str(work)))
    hosts = comm.allgather(socket.gethostname())
    if mpi_rank():
        tell_supervisor(Path(given) / RANKS, token)
        with MPICommExecutor():
            pass
        if code := comm.bcast(None):
            _end_later(code)
        yield None
        return
    serving = MPICommExecutor()
    meeting = Meeting(cast(Executor, serving.__enter__()), token, hosts)
    code = 0
    try:
        yield meeting
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        code = error.code if isinstance(error, UserError) else Code.INTERRUPTED if interrupted else Code.MISTAKE
        raise
    finally:
        if not (code and meeting.is_busy):
            serving.__exit__(None, None, None)
            comm.bcast(code)


class Meeting:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, executor: Executor, token: str, hosts: list[str]) -> None:
        self.executor, self._token, self._hosts = executor, token, hosts
        self.is_busy = False
        """Whether other ranks may be at work, who are not waited for where a run fails."""

    def share(self, work: Path) -> None:
        """Raises UserError unless all ranks see the work folder, in which they hear of one another from now on."""
        place = work / RANKS
        if not tell_supervisor(place, self._token):
            return
        deadline = time.monotonic() + PATIENCE
        while missing := [rank for rank in range(1, mpi_size()) if read_rank(place, self._token, rank) is None]:
            if time.monotonic() > deadline:
                names = ", ".join(dict.fromkeys(self._hosts[rank] for rank in missing))
                raise UserError(f"{work.parent}: not seen by {name_ranks(missing)} on {names}\n{CURE}")
            time.sleep(0.02)
