"""The decision of all ranks after each step: to go on, to stop in good order, or that something is wrong.

A signal may reach only one rank, and the time limit passes on every rank at another moment. So the ranks vote: each
brings what it wishes as a number, on the host, and all do what the most urgent wish says.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from threading import Lock
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from data_prep.common.codes import Code
from data_prep.common.errors import SharedError, UserError
from data_prep.common.launchers import World
from pretraining.processes.group import find_greatest, host_group

STARTED = time.monotonic()
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # those that ask a run to save and stop
ECHO_SECONDS = 0.5  # a signal so soon after a Ctrl-C is the same key press, passed on by a launcher
QUESTION_SECONDS = 0.5  # how long ranks go on within a step before they ask one another whether to stop
STOPPING = "\nstopping after this step, and saving; press Ctrl-C again to end at once"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Decision(IntEnum):
    """A wish of a rank, and the decision of all; the greater, the more urgent."""

    GO_ON = 0
    LIMIT = 1
    SIGNAL = 2
    INTERRUPT = 3
    WRONG = 4

    @property
    def cause(self) -> str:
        """The cause of a stop, in the words of the last message."""
        return {Decision.LIMIT: "the time limit", Decision.INTERRUPT: "Ctrl-C"}.get(self, "a signal")


class StoppedError(SharedError):
    """Ends a run that has saved and stops before it is done."""

    def __init__(self, message: str, decision: Decision):
        super().__init__(message)
        self.code = Code.INTERRUPTED if decision == Decision.INTERRUPT else Code.STOPPED


class Control:
    """Lets signals and the time limit stop a run in good order: within the block, SIGTERM, SIGHUP and SIGUSR1 are
    only noted until all ranks call `decide` together; within `interruptible`, the first Ctrl-C too."""

    def __init__(self, world: World, limit: float | None = None):
        """Sets the time limit, in seconds from the start of the process. The clock of rank 0 counts for all."""
        self._deadline = math.inf if limit is None or world.rank else STARTED + limit
        self._least = 0.0 if limit is None else 0.05 * min(limit, 600)
        self._say: Callable[[str], None] = print
        # torchrun passes the first Ctrl-C on as SIGINT, and one that follows as SIGTERM
        self._again = {signal.SIGINT, signal.SIGTERM} if world.launcher == "torchrun" else {signal.SIGINT}
        self._asked, self._interrupted_at = Decision.GO_ON, 0.0
        self._first_press = Lock()  # once it is held, a Ctrl-C was answered
        self._before: dict[int, Any] = {}
        self._last: float | None = None
        self._longest = 0.0
        self._questions, self._apart, self._voted_at = 0, QUESTION_SECONDS, time.monotonic()

    def __enter__(self) -> Control:
        self._before = {number: signal.signal(number, self._hear) for number in list_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self, say: Callable[[str], None]) -> Iterator[None]:
        """Surrounds the training itself: the first Ctrl-C is noted and answered, and a second one ends the process at
        once. Elsewhere the first one does."""
        self._say = say
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def stop_requested(self) -> bool:
        """Whether this process has heard a signal that asks the run to stop."""
        return self._asked != Decision.GO_ON

    def _hear(self, number: int, _: object) -> None:
        """Notes a signal. One key press may arrive several times, from the terminal and from the launcher, the next one
        between any two lines of this."""
        if number == signal.SIGINT and self._first_press.acquire(blocking=False):
            self._interrupted_at = time.monotonic()
            self._asked = Decision.INTERRUPT
            with suppress(Exception):  # whatever was being printed when the signal came
                self._say(STOPPING)
        elif self._asked == Decision.INTERRUPT:
            if number in self._again and time.monotonic() > self._interrupted_at + ECHO_SECONDS:
                handle_signals(signal.SIG_IGN)
                raise KeyboardInterrupt  # without a number, which would be that of a signal to save
        elif number != signal.SIGINT:
            self._asked = max(self._asked, Decision.SIGNAL)

    def decide(self, wrong: bool, saving: float) -> Decision:
        """Decides with all ranks how to go on after this step. `wrong` says that this rank has found a fault, and
        `saving` how long a checkpoint takes, as far as is known: the time limit leaves room for one."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - (self._last or now)), now
        room = max(self._least, 2 * (saving + self._longest))
        limit = Decision.LIMIT if now + room > self._deadline else Decision.GO_ON
        return self._vote(max(self._asked, limit, Decision.WRONG if wrong else Decision.GO_ON))

    def stop_requested_anywhere(self) -> bool:
        """Whether any rank has heard a signal, so that all break off what they do and save; all ask it together.

        They vote about once in `QUESTION_SECONDS`, and not each time: with many ranks a vote takes milliseconds.
        """
        if dist.get_world_size() == 1:
            return self.stop_requested
        self._questions += 1
        enough = self._questions * self._apart >= QUESTION_SECONDS
        return enough and self._vote(self._asked) != Decision.GO_ON

    def _vote(self, wish: Decision) -> Decision:
        """Returns the most urgent wish of all ranks, which call it together; agrees on the pause between questions."""
        if dist.get_world_size() == 1:
            return wish
        if self._questions:
            self._apart = (time.monotonic() - self._voted_at) / self._questions
        vote = torch.tensor([wish, self._apart], dtype=torch.float64)
        vote = find_greatest(vote, host_group())
        self._questions, self._apart, self._voted_at = 0, float(vote[1]), time.monotonic()
        return Decision(int(vote[0]))


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Gives all signals that may end a run the same handler."""
    for number in (signal.SIGINT, *list_signals()):
        signal.signal(number, handler)


def list_signals() -> list[signal.Signals]:
    """Signals that ask a run to save and stop; a closed terminal does not where SIGHUP is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]


def parse_time_limit(text: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """Parses a time limit such as `90m`; returns it in seconds from the start of the process. `auto` is the end of the
    Slurm job, if there is one."""
    if text == "auto":
        end = environment.get("SLURM_JOB_END_TIME", "")  # in seconds since 1970
        known = re.fullmatch(r"\d{1,12}", end, re.ASCII)
        return int(end) - time.time() + time.monotonic() - STARTED if known else None
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return float(match[1]) * UNITS[match[2]]
    raise UserError(f"--time-limit {text}: not understood; write 90m, 2h or 1.5d")
