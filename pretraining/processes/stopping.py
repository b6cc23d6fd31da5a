"""What all ranks decide together after each step: to go on, to stop in good order, or that something is wrong.

A signal reaches a rank at any moment, and perhaps only one of them; the time limit passes on each at another. So each
says what it wants in one all-reduce of a single number, on the host, and the greatest wish is what all do.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from data_prep.common.errors import UserError
from pretraining.processes.group import SharedError

STARTED = time.monotonic()
STOPPED = 75
"""exit code of a run that saved and stopped before its end: start the same command again (EX_TEMPFAIL)"""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PATIENCE = timedelta(hours=2)
"""longer than any wait that watch.py allows"""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Decision(IntEnum):
    """The greater, the more urgent."""

    GO_ON = 0
    LIMIT = 1
    SIGNAL = 2
    WRONG = 3


class StoppedError(SharedError):
    """The run has saved and ends before its end."""


class Control:
    """Listens for signals while it is entered; all ranks call `decide` together."""

    def __init__(self, limit: float | None = None):
        """`limit` counts seconds from the start of the process."""
        self._deadline = None if limit is None else STARTED + limit
        self._least = 0.0 if limit is None else 0.05 * min(limit, 600)
        self._group = (
            dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(timeout=PATIENCE, backend="gloo")
        )
        self._signalled = False
        self._before: dict[int, Any] = {}
        self._last: float | None = None
        self._longest = 0.0

    def __enter__(self) -> Control:
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def decide(self, wrong: bool, saving: float) -> Decision:
        """What happens after this step; `saving` is how long a checkpoint takes, as far as is known."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - (self._last or now)), now
        wish = Decision.GO_ON
        if self._deadline is not None and now > self._deadline - max(self._least, 2 * (saving + self._longest)):
            wish = Decision.LIMIT
        if self._signalled:
            wish = Decision.SIGNAL
        if wrong:
            wish = Decision.WRONG
        if dist.get_world_size() > 1:
            vote = torch.tensor([int(wish)])
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
            wish = Decision(int(vote))
        return wish


def time_limit(text: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds from the start of the process: `90m`, `2h`, and as Slurm writes it `30:00`, `12:00:00`, `1-12:00:00`.

    `auto` is the end of the Slurm job.
    """
    if text == "auto":
        end = environment.get("SLURM_JOB_END_TIME", "")
        return int(end) - time.time() + time.monotonic() - STARTED if end.isdigit() else None
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return float(match[1]) * UNITS[match[2]]
    if match := re.fullmatch(r"(\d+):(\d\d)", text):  # Slurm's minutes and seconds
        return 60.0 * int(match[1]) + int(match[2])
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    raise UserError(f"--time-limit {text}: not understood; write 90m, 2h, 12:00:00 or 1-12:00:00")
