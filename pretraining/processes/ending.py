"""How a process ends: which rank says why, what stays in the run's folder, and with which exit code.

    with Ending() as ending:
        ending.world = find_world(os.environ)
        ...
        ending.record_in(folder)    # once no other run can be in that folder
        ...
    exit_now(ending.code)

A thread of `Watch` that ends its process says so through the same `report_end`.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import traceback
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, NamedTuple, NoReturn

from data_prep.common.codes import ENDED as ENDED
from data_prep.common.codes import Code as Code
from data_prep.common.errors import UnreachedError, UserError, printable
from data_prep.common.files import refuse_link, tells_of_gone_storage, write_json
from data_prep.common.launchers import World
from data_prep.common.locks import LOCK, read_lock
from pretraining.processes.ahead import await_call
from pretraining.processes.gpu_faults import note_gpu_failure
from pretraining.processes.stopping import SIGNALS, handle_signals

STACKS = "stacks"
INTERRUPTED = "interrupted"
INTERRUPTION = f"{INTERRUPTED}; the same command continues from the last checkpoint, or begins anew where there is none"
GONE = "the storage is gone, or cannot be reached; the same command continues when it is back"
WRITE_SECONDS = 10.0  # for files about the end: what ends a run may be the disk itself, which then never answers


class Outcome(NamedTuple):
    """Why a run ends, as ranks tell one another."""

    code: int
    reason: str
    rank: int
    """the rank that found the reason: it failed itself, or noticed that others are gone"""


class Ending:
    """Surrounds all that a process does, and turns its end into a message, a record and an exit code.

    No error comes out of it, and no process group is closed after one: under NCCL that may wait for ever for ranks
    that are gone. `exit_now` leaves it to the operating system.
    """

    def __init__(self) -> None:
        self.world, self.code = World(), 0
        self._run: Path | None = None
        self.start: bytes | None = None
        """content of the lock file in the run folder while no other start holds it; None if it is not compared"""

    def record_in(self, run: Path) -> None:
        """Sets the folder in which the end will be recorded, which rank 0 has locked; rank 0 removes the records of the
        last end from it."""
        self._run, self.start = run, identify_start(self.world, run)
        if self.world.rank == 0:
            shutil.rmtree(run / STACKS, ignore_errors=True)
            with suppress(OSError):
                (run / ENDED).unlink(missing_ok=True)

    def __enter__(self) -> Ending:
        handle_signals(_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[True]:
        handle_signals(signal.SIG_IGN)
        if isinstance(error, SystemExit):  # a library wants to end the program
            self.code = error.code if isinstance(error.code, int) else Code.MISTAKE
            return True
        error = note_gpu_failure(error, self._run)
        outcome = find_outcome(error, self.world.rank)
        if outcome.code == Code.MISTAKE:
            traceback.print_exception(error)
        report_end(outcome, self.world, self._run, self.start, rank_0_missing=isinstance(error, UnreachedError))
        self.code = outcome.code
        return True


def identify_start(world: World, run: Path | None) -> bytes | None:
    """Returns the lock file of rank 0, which is another one at each start of a run. None without a folder, and for rank
    0: it would lose its lock by reading it, and as long as it holds it, there is no other start."""
    return read_lock(run / LOCK) if run is not None and world.rank else None


def report_end(outcome: Outcome, world: World, run: Path | None, start: bytes | None, rank_0_missing: bool) -> None:
    """Says why this process ends, then leaves in the folder `run` what helps to understand it.

    Rank 0 speaks for all ranks, or rank 1 where rank 0 is gone or was never reached, and the first rank of the second
    machine, since rank 1 may be gone with the first one. The speaker also writes why the run ended, because torchrun
    makes 1 of every exit code that is not 0. Where a rank was lost or hangs, all ranks write where each of their
    threads stands. A rank that was paused may end late: it writes nothing if the run has another `start` by now, and it
    does not replace the reason that another rank has written.
    """
    speaks = world.rank == 0 or (rank_0_missing and world.rank in (1, world.local_size))
    if speaks:
        _say(outcome, world, run)
    if run is not None:
        with suppress(LateError):
            await_call(WRITE_SECONDS, lambda: _write(outcome, world, run, start, speaks))


def find_outcome(error: BaseException | None, rank: int) -> Outcome:
    """Turns an error that nobody caught into an exit code and a reason; no error means that the run is done."""
    if error is None:
        return Outcome(Code.DONE, "done", rank)
    if isinstance(error, UserError | OSError) and tells_of_gone_storage(error):
        return Outcome(Code.RANK_LOST, f"{error}\n{GONE}", rank)
    if isinstance(error, UserError):
        return Outcome(error.code, str(error), rank)
    if isinstance(error, PermissionError):
        return Outcome(Code.CURE, str(error), rank)
    if isinstance(error, KeyboardInterrupt):
        return explain_interruption(error, rank)
    return Outcome(Code.MISTAKE, traceback.format_exception_only(error)[-1].strip(), rank)


def explain_interruption(error: KeyboardInterrupt, rank: int) -> Outcome:
    """Turns a signal that ended the work of this rank, as `_interrupt` raises it, into an exit code and a reason."""
    stopped = error.args[:1] in [(number,) for number in SIGNALS]
    return Outcome(Code.STOPPED if stopped else Code.INTERRUPTED, INTERRUPTION, rank)


def _say(outcome: Outcome, world: World, run: Path | None) -> None:
    """Prints what users need to know, and nothing where they know it: at a good end, and below a traceback."""
    if outcome.code == Code.DONE or (outcome.code == Code.MISTAKE and outcome.rank == world.rank):
        return
    text = printable(outcome.reason)
    if text.startswith(INTERRUPTED):
        text = f"\n{text}"  # below the ^C that the terminal shows
    elif outcome.code not in (Code.STOPPED, Code.INTERRUPTED):
        text = f"error: {text}" if outcome.rank == world.rank else f"error: rank {outcome.rank}: {text}"
        if outcome.code == Code.RANK_LOST and run is not None:
            text += f"\nthe stacks of the ranks that still run are in {run / STACKS}"
    with suppress(OSError):  # a launcher that is gone reads no more
        print(text, file=sys.stderr, flush=True)


def _write(outcome: Outcome, world: World, run: Path, start: bytes | None, speaks: bool) -> None:
    """Writes the files about the end. A disk that refuses them must not hide what has been said."""
    if start is not None and read_lock(run / LOCK) != start:
        return
    with suppress(Exception):
        if outcome.code == Code.RANK_LOST:
            (run / STACKS).mkdir(parents=True, exist_ok=True)
            with open(run / STACKS / f"rank-{world.rank:05}.txt", "w", opener=refuse_link) as file:
                faulthandler.dump_traceback(file, all_threads=True)
    with suppress(Exception):
        if speaks and not (run / ENDED).exists():
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            content = {"code": outcome.code, "reason": outcome.reason, "rank": outcome.rank, "time": now}
            if job := os.environ.get("SLURM_JOB_ID"):  # its script looks for the end of its own start
                content["start"] = f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
            write_json(run / ENDED, content)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    """Ends the work in good order, once: launchers send their signals again and again."""
    handle_signals(signal.SIG_IGN)
    raise KeyboardInterrupt(number)
