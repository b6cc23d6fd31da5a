"""Sides of a contest, each in a process of its own: they load what they like, and one that dies says why."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError
from data_prep.common.supervision import end_with_parent
from pretraining.engine.engine import is_shortage
from pretraining.processes.environment import prepare_process

Answerer = Callable[[Any], Any]
"""What a side is: it answers questions, of which each may be a turn."""


@dataclass(frozen=True)
class Kind:
    """How a side is made."""

    make: Callable[..., Answerer]
    """Called in the process of the side."""
    prepared: bool = True
    """Whether its process keeps freed memory and shares cores as ours do; a peer's does not."""
    small_steps: bool = False
    """Whether its threads may wait at work for one another, as those of our commands with small steps do."""


class SideFailedError(UserError):
    """A side cannot go on, and says why."""


class SideShortError(SideFailedError):
    """A side has no memory for what it was asked."""


class NoMemoryError(UserError):
    """What a side says that has no memory."""


class Side:
    """A side as the one sees it who asks it."""

    def __init__(self, name: str, process: BaseProcess, pipe: Connection):
        self.name, self._process, self._pipe = name, process, pipe

    def ask(self, question: Any) -> Any:
        """What the side answers; SideFailedError where it cannot."""
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended; what it said last may still be there
            self._pipe.send(question)
        return self.hear()

    def turn(self, question: Any) -> float:
        """The seconds in which the side answers, by its own clock."""
        return float(self.ask(("turn", question)))

    def hear(self) -> Any:
        """What the side says."""
        return hear(self.name, self._process, self._pipe)

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        self._pipe.close()
        self._process.join(1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def hear(name: str, process: BaseProcess, pipe: Connection) -> Any:
    """What the process of a side says; SideFailedError, with the reason, where it has ended or cannot go on."""
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join(10)
        kind = SideShortError if process.exitcode == -signal.SIGKILL else SideFailedError
        raise kind(f"{name}: {ending(process.exitcode)}") from None
    if isinstance(answer, UserError):
        raise (SideShortError if isinstance(answer, NoMemoryError) else SideFailedError)(f"{name}: {answer}")
    return answer


def ending(exit_code: int | None) -> str:
    """Why a process may have ended without a word."""
    if exit_code == -signal.SIGKILL:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return f"was killed, most likely for want of memory: the machine has {memory:.0f} GiB"
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}; what it said stands above"


@contextmanager
def open_sides(kinds: Mapping[str, Kind], *arguments: Any) -> Iterator[dict[str, Side]]:
    """A process for each side, made with these arguments one after another; SideFailedError for one that cannot be."""
    context = multiprocessing.get_context("spawn")
    sides: dict[str, Side] = {}
    try:
        for name, kind in kinds.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(kind, arguments, theirs), daemon=True)
            with prepared_environment(kind.prepared, kind.small_steps):
                process.start()
            theirs.close()
            sides[name] = Side(name, process, ours)
        for side in sides.values():
            side.hear()
        yield sides
    finally:
        for side in sides.values():
            side.end()


def serve(kind: Kind, arguments: tuple[Any, ...], pipe: Connection) -> None:
    """The process of a side: says that it is ready, and answers until nobody asks any more."""
    end_with_parent()
    offer_to_be_killed()
    if kind.prepared:
        prepare_process(kind.small_steps)
    try:
        answerer = kind.make(*arguments)
        pipe.send("ready")
        while True:
            pipe.send(_answer(answerer, pipe.recv()))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except UserError as error:
        pipe.send(UserError(str(error)))
    except Exception as error:
        if isinstance(error, RuntimeError) and is_shortage(error):
            pipe.send(NoMemoryError("no memory for such a step"))
        else:
            traceback.print_exc()
            pipe.send(UserError(f"{type(error).__name__}: {error}"))


def offer_to_be_killed() -> None:
    """Where memory runs out, Linux is to end a side, and not the one who asks it or a stranger."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


def _answer(answerer: Answerer, question: Any) -> Any:
    if not (isinstance(question, tuple) and question and question[0] == "turn"):
        return answerer(question)
    start = time.perf_counter()
    answerer(question[1])
    return time.perf_counter() - start


@contextmanager
def prepared_environment(prepared: bool, small_steps: bool = False) -> Iterator[None]:
    """What must be in the environment before a process loads torch."""
    before = dict(os.environ)
    if prepared:
        prepare_process(small_steps)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def muffled() -> Iterator[None]:
    """Leaves out what PyTorch's profiler says on the stream of errors, which no setting keeps it from."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
