"""The ranks of an MPI job: how they meet, and how the tasks of rank 0 reach the others.

MPI carries tasks and results. What becomes of ranks is told beside it (heartbeats.py), since MPI waits for ever for one
that is gone. Only rank 0 writes to the terminal, and what goes wrong on another rank it says with rank and host.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from data_prep.common.codes import Code
from data_prep.common.errors import UserError, name_ranks
from data_prep.common.heartbeats import LONGEST_TEXT, Heartbeats, tell_supervisor
from data_prep.common.launchers import mpi_rank, mpi_size

Task = TypeVar("Task")
Result = TypeVar("Result")

PATIENCE = 10.0
"""Seconds in which all hosts must see a file that rank 0 writes, which on network file systems takes a while."""
LATER = 5.0
"""Seconds after which a rank tells by itself what rank 0 has not told for it."""
RANKS = "ranks"
"""The folder in the work folder by which ranks hear of one another."""
CURE = "give --out a folder that all hosts share, by its full path"

Fault = tuple[int, str]  # an exit code, and what the user is told

_met = False
"""Whether the ranks have met, so that rank 0 tells what goes wrong on this one."""


def attempt_together(attempt: Callable[[], Result]) -> Result:
    """Has every rank attempt something; where any of them fails all end, and rank 0 says what went wrong, and where."""
    if mpi_size() == 1:
        return attempt()
    told = io.StringIO()
    silenced = contextlib.ExitStack()
    if mpi_rank():
        silenced.enter_context(contextlib.redirect_stdout(told))
        silenced.enter_context(contextlib.redirect_stderr(told))
    fault: Fault | None = None
    own: BaseException | None = None
    with silenced:
        try:
            result = attempt()
        except UserError as error:
            own, fault = error, (Code.CURE, str(error))
        except SystemExit as error:
            own, fault = error, (error.code if isinstance(error.code, int) else Code.CURE, told.getvalue())
        except Exception as error:
            own, fault = error, (Code.MISTAKE, traceback.format_exc())
    _compare(fault, own)
    return result


def _compare(fault: Fault | None, own: BaseException | None = None) -> None:
    """Meets the other ranks; raises the error of this rank, or of another one where only that has one."""
    global _met
    found: list[tuple[str, Fault | None]] = _connect().allgather((socket.gethostname(), fault))
    _met = True
    if mpi_rank() == 0 and own is not None:
        raise own
    for rank, (host, theirs) in enumerate(found):
        if theirs is not None:
            code, text = theirs
            if mpi_rank() or not code:
                raise SystemExit(code)
            message = f"rank {rank} on {host}: {text}"
            if code == Code.CURE:
                raise UserError(message)
            print(f"error: {message}", file=sys.stderr)
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
    return UserError(f"rank {mpi_rank()} on {socket.gethostname()}: {fault}" if mpi_rank() else fault)


def tell_fault(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tells of an exception that nothing else has told of, as `sys.excepthook`: to rank 0 where that is another one."""
    text = "".join(traceback.format_exception(kind, error, trace))[-LONGEST_TEXT:]
    if not _met:
        try:
            _compare((Code.MISTAKE, text))
        except SystemExit:  # rank 0 has told
            return
        except BaseException as fault:
            text += f"and MPI: {fault}"
    elif mpi_rank() and tell_supervisor(fault=text):
        return
    name = f"rank {mpi_rank()} on {socket.gethostname()}: " if mpi_rank() else ""
    print(f"{name}{text}", file=sys.stderr, flush=True)


def on_rank(function: Callable[[Task], Result], task: Task) -> Result:
    """Does a task of rank 0 on another rank; a fault of the code is told with the rank and its host."""
    try:
        return function(task)
    except UserError:
        raise
    except Exception:
        raise RankError(f"rank {mpi_rank()} on {socket.gethostname()}:\n{traceback.format_exc()}") from None


class RankError(Exception):
    """A fault of the code on a rank, whose message has its traceback."""


@contextmanager
def serving_ranks(work: Path) -> Iterator[Meeting | None]:
    """Yields the meeting through which rank 0 hands out work; on other ranks None, once all work is done.

    `work` is the folder in which ranks are to hear of one another, as the user of rank 0 has named it.
    When rank 0 fails while others are busy, nothing is waited for: those that watch over the ranks end them.
    """
    comm = _connect()
    from mpi4py.futures import MPICommExecutor

    token, given = comm.bcast((secrets.token_hex(8), str(work)))
    hosts = comm.allgather(socket.gethostname())
    if mpi_rank():
        tell_supervisor(folder=str((Path(given) / RANKS).absolute()), token=token, hosts=hosts)
        with MPICommExecutor():
            pass
        if code := comm.bcast(None):
            raise SystemExit(code)
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
        if not (code and meeting.busy):
            serving.__exit__(None, None, None)
            comm.bcast(code)


class Meeting:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, executor: Executor, token: str, hosts: list[str]) -> None:
        self.executor, self._token, self._hosts = executor, token, hosts
        self.busy = False
        """Whether tasks may be at work on other ranks."""

    def share(self, work: Path) -> None:
        """Raises UserError unless all ranks see the work folder, in which they hear of one another from now on."""
        place = (work / RANKS).absolute()
        if not tell_supervisor(folder=str(place), token=self._token, hosts=self._hosts):
            return
        files = Heartbeats(place, self._token, 0, self._hosts)
        deadline = time.monotonic() + PATIENCE
        while missing := files.missing():
            if time.monotonic() > deadline:
                names = ", ".join(dict.fromkeys(self._hosts[rank] for rank in missing))
                raise UserError(f"{work.parent}: not seen by {name_ranks(missing)} on {names}\n{CURE}")
            time.sleep(0.02)
