"""What all ranks decide together after each step: to go on, to stop in good order, or that something is wrong.

A signal may reach only one rank, and the time limit passes on every rank at another moment. So the ranks vote: each
brings what it wishes into one all-reduce of a number, on the host, and all do what the most urgent wish says.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from enum import IntEnum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from data_prep.common.errors import UserError
from pretraining.processes.group import SharedError

STARTED = time.monotonic()
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # those that ask a run to save and stop
PATIENCE = timedelta(hours=2)  # longer than any wait that `Watch` allows
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Decision(IntEnum):
    """What a rank wishes, and what all then do; the greater, the more urgent."""

    GO_ON = 0
    LIMIT = 1
    SIGNAL = 2
    WRONG = 3


class StoppedError(SharedError):
    """Ends a run that has saved and stops before it is done."""


class Control:
    """Lets signals and the time limit stop a run in good order: within the block, a signal is only noted until all
    ranks call `decide` together."""

    def __init__(self, limit: float | None = None):
        """Sets the time limit, in seconds from the start of the process."""
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

    def _hear(self, *_: object) -> None:
        self._signalled = True

    def decide(self, wrong: bool, saving: float) -> Decision:
        """What all ranks do after this step. `wrong` says that this rank has found a fault, and `saving` how long a
        checkpoint takes, as far as is known: the time limit leaves room for one."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - (self._last or now)), now
        late = self._deadline is not None and now > self._deadline - max(self._least, 2 * (saving + self._longest))
        wishes = {Decision.LIMIT: late, Decision.SIGNAL: self._signalled, Decision.WRONG: wrong}
        vote = torch.tensor([max((wish for wish, wished in wishes.items() if wished), default=Decision.GO_ON)])
        if dist.get_world_size() > 1:
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
        return Decision(int(vote))


def time_limit(text: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """Understands a time limit, in seconds from the start of the process: `90m`, `2h`, and as Slurm writes it `30:00`,
    `12:00:00`, `1-12:00:00`; `auto` is the end of the Slurm job, if there is one."""
    if text == "auto":
        end = environment.get("SLURM_JOB_END_TIME", "")
        return int(end) - time.time() + time.monotonic() - STARTED if end.isdigit() else None
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return float(match[1]) * UNITS[match[2]]
    if match := re.fullmatch(r"(\d+):(\d\d)", text):  # Slurm's minutes and seconds
        return 60.0 * int(match[1]) + int(match[2])
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text):
        days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    raise UserError(f"--time-limit {text}: not understood; write 90m, 2h, 12:00:00 or 1-12:00:00")
