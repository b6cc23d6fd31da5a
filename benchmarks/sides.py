"""Sides of a contest, each in a process of its own, whose error names the cause if it dies, or all in this process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from data_prep.common.errors import UserError
from data_prep.common.supervision import end_with_parent
from pretraining.engine.engine import is_shortage
from pretraining.processes.environment import prepare_process


@dataclass(frozen=True)
class SideSpec:
    """How to start a side."""

    make: Callable[..., Any]
    """Creates, in the process of the side, the object whose methods the contest calls."""
    prepared: bool = True
    """Whether its process is prepared as those of our commands: freed memory is kept, and cores are shared."""
    small_steps: bool = False
    """Whether its threads spin while they wait for one another, as in our commands with small steps."""


class SideFailedError(UserError):
    """A side has failed."""


class NoMemoryError(SideFailedError):
    """A side has too little memory for a call."""


@dataclass(frozen=True)
class Side:
    """Handle of a side, and of its process if it has one of its own."""

    name: str
    process: BaseProcess | None
    pipe: Connection | InnerPipe

    def ask(self, method: str, *given: Any) -> Any:
        """Calls a method of the side; returns what it returns. SideFailedError where it fails."""
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended; its last answer may still be in the pipe
            self.pipe.send((method, given))
        return self.hear()

    def hear(self) -> Any:
        """Receives an answer. Raises SideFailedError if the side has failed or its process has ended."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            assert self.process is not None
            self.process.join(10)
            if (code := self.process.exitcode) == -signal.SIGKILL:
                raise NoMemoryError(f"{self.name}: was killed, most likely for want of memory") from None
            raise SideFailedError(f"{self.name}: ended with exit code {code}; what it said stands above") from None
        if isinstance(answer, SideFailedError):
            raise type(answer)(f"{self.name}: {answer}")
        return answer

    def end(self) -> None:
        """Ends the side, even during a call."""
        self.pipe.close()
        if self.process is None:
            return
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class InnerPipe:
    """Stands for the pipe to a side in this process, which has no loop of its own: it answers at once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._side = self._answer = self._call(make)

    def _call(self, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except Exception as error:
            return explain(error)

    def send(self, call: tuple[str, tuple[Any, ...]]) -> None:
        method, given = call
        self._answer = self._call(getattr(self._side, method), *given)

    def recv(self) -> Any:
        return self._answer

    def close(self) -> None:
        getattr(self._side, "close", lambda: None)()
        self._side = self._answer = None


_shared = False


@contextmanager
def sides_in_this_process() -> Iterator[None]:
    """Within the block, sides share this process, so that none has to load what another has loaded."""
    global _shared
    _shared = True
    try:
        yield
    finally:
        _shared = False


def share_process() -> bool:
    """Whether sides share this process."""
    return _shared


@contextmanager
def open_sides(kinds: Mapping[str, SideSpec], *arguments: Any) -> Iterator[dict[str, Side]]:
    """Makes all sides with these arguments, each in a process of its own unless they share this one. Raises
    SideFailedError if one cannot start."""
    context = multiprocessing.get_context("spawn")
    sides: dict[str, Side] = {}
    try:
        for name, kind in kinds.items():
            if _shared:
                sides[name] = Side(name, None, InnerPipe(partial(kind.make, *arguments)))
                continue
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(kind, arguments, theirs), daemon=True)
            with mock.patch.dict(os.environ):  # its process needs these variables before it loads torch
                if kind.prepared:
                    prepare_process(kind.small_steps)
                process.start()
            theirs.close()
            sides[name] = Side(name, process, ours)
        for side in sides.values():
            side.hear()
        yield sides
    finally:
        for side in sides.values():
            side.end()
        if _shared and torch.cuda.is_available():  # for those that come next
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


Answer = Callable[..., tuple[str, tuple[Any, ...]]]
"""Answers the last call to a side, or says that it is ready; returns the next call: a method and its arguments."""


def serve(kind: SideSpec, arguments: tuple[Any, ...], pipe: Connection) -> None:
    """Runs in the process of a side: creates it, and answers calls until the pipe is closed."""

    def answer(found: Any = None) -> tuple[str, tuple[Any, ...]]:
        pipe.send(found)
        method, given = pipe.recv()
        return method, given

    end_with_parent()
    with suppress(OSError):  # Linux kills this process first if memory runs out
        Path("/proc/self/oom_score_adj").write_text("900")
    if kind.prepared:
        prepare_process(kind.small_steps)
    try:
        side, found = kind.make(*arguments), None
        if hasattr(side, "take_turns"):  # a loop of its own, in which `answer` ends a turn
            side.take_turns(answer)
        while True:
            method, given = answer(found)
            found = getattr(side, method)(*given)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(explain(error))


def explain(error: Exception) -> SideFailedError:
    """Converts an error of a side to one that says in a line what has failed; prints its traceback if it is a fault."""
    if isinstance(error, UserError):
        return SideFailedError(str(error))
    if isinstance(error, RuntimeError) and is_shortage(error):
        return NoMemoryError("no memory for such a step")
    traceback.print_exception(error)
    return SideFailedError(f"{type(error).__name__}: {error}")
