"""Tells the ranks of a job what becomes of one another, by files in the folder that they share.

OUT/.cloze-work/ranks/NUMBER     one for each rank, which alone writes it: token of the job, host, count, exit code

Every rank counts in its own file. Rank 0 looks at all files and the others look at that of rank 0, so a rank that is
gone is found whatever the launcher does about it. A file of another token is of an earlier job. Only contents are
compared, by each host's own clock; and time in which this process could not look counts for nothing.

Training detects silent ranks through PyTorch's store (pretraining/processes/watchdog.py), which preparation lacks.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.common.codes import Code

PERIOD = 2.0
"""Seconds between two looks, and between two counts."""
SOON = 0.1
"""Seconds between two looks until rank 0 appears."""
LOST = 40.0
"""Seconds without a new count after which a rank is gone."""
CONTINUES = "the same command continues"

_supervisor: int | None = None
"""In a child: the pipe to the process that watches over it."""


def report_to(supervisor: int) -> None:
    """Has this process report through a pipe to the one that watches over it."""
    global _supervisor
    _supervisor = supervisor


def tell_supervisor(folder: Path, token: str) -> bool:
    """Tells the process that watches over this one where ranks hear of one another; returns whether there is one."""
    if _supervisor is not None:
        with suppress(OSError):
            os.write(_supervisor, json.dumps([str(folder.absolute()), token]).encode())
            return True
    return False


class Verdict(NamedTuple):
    """Why a rank must end because of another one, and with which exit code."""

    text: str
    """What the user is told; nothing where another rank tells it."""
    code: int


class Heartbeats:
    """The files of all ranks of a job, as one of them writes and reads them."""

    def __init__(
        self, folder: Path, token: str, rank: int, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins: rank 0 makes the folder for all, the others wait until they see its file in it."""
        self._folder, self._token, self._rank, self._clock = folder, token, rank, clock
        self._count, self._others = 0, range(1, size) if rank == 0 else range(1)
        self._last: dict[int, dict[str, Any]] = {}
        self._silent = dict.fromkeys(self._others, 0.0)
        self._checked = self._beat_at = clock()
        self.arrived = False
        """Whether this rank has a file of its own."""
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            self._arrive()

    def check_others(self) -> Verdict | None:
        """Counts on in the file of this rank; returns a verdict where another rank has ended or is gone.

        Nothing is said of files that are not there: not yet, or no more since the work is done.
        """
        now = self._clock()
        passed, self._checked = min(now - self._checked, 2 * PERIOD), now
        if not self.arrived:
            if self._read(0) is not None:
                self._arrive()
            return None
        if now - self._beat_at >= PERIOD / 2:
            self._beat_at = now
            self._write()
        return next(filter(None, (self._check(rank, passed) for rank in self._others)), None)

    def end(self, code: int) -> bool:
        """Notes the exit code of this rank in its file; returns whether that was possible."""
        return self.arrived and self._write(code=code)

    def wait(self) -> int | None:
        """Waits until rank 0 has ended because of this rank; returns its exit code, where that is known."""
        deadline = self._clock() + LOST
        while self._clock() < deadline and self._read(0) is not None:
            if (verdict := self._check(0, PERIOD / 4)) is not None:
                return verdict.code
            time.sleep(PERIOD / 4)
        return None

    def _check(self, rank: int, passed: float) -> Verdict | None:
        """Returns a verdict where this rank has ended, or was silent too long, now that more seconds have passed."""
        said = self._read(rank)
        if said is None:
            self._silent[rank] = 0.0
            return None
        name = f"error: rank {rank} on {said.get('host')}"
        code = said.get("code")
        if isinstance(code, int) and code:
            text = f"{name} has ended with exit code {code}, and says why; {CONTINUES}"
            return Verdict("" if self._rank else text, code)
        self._silent[rank] = 0.0 if said != self._last.get(rank) else self._silent[rank] + passed
        self._last[rank] = said
        if self._silent[rank] < LOST:
            return None
        text = f"{name} is gone (nothing was heard of it for {LOST:.0f} s); {CONTINUES}"
        return Verdict(text if self._rank < 2 else "", Code.RANK_LOST)

    def _arrive(self) -> None:
        """Makes the file of this rank, by which rank 0 sees that both see the same folder.

        It is there as a whole or not at all: of a rank that was killed meanwhile an empty file would say nothing.
        """
        path = self._folder / str(self._rank)
        with suppress(OSError):
            path.with_suffix(".new").write_bytes(self._content())
            path.with_suffix(".new").replace(path)
            self.arrived = True

    def _write(self, **more: int) -> bool:
        """Writes the file of this rank where it is still there: once the work is done, the folder goes."""
        self._count += 1
        try:
            with (self._folder / str(self._rank)).open("r+b") as file:
                file.write(self._content(**more))
                file.truncate()
        except OSError:
            return False
        return True

    def _content(self, **more: int) -> bytes:
        said = {"token": self._token, "host": socket.gethostname(), "count": self._count, **more}
        return json.dumps(said).encode()

    def _read(self, rank: int) -> dict[str, Any] | None:
        return read_rank(self._folder, self._token, rank, anew=not self.arrived)


def read_rank(folder: Path, token: str, rank: int, anew: bool = True) -> dict[str, Any] | None:
    """Reads what a rank of this job says in its file: None if there is none, nothing where it is just being written.

    NFS asks its server `anew` for a folder that is opened."""
    if anew:
        for place in reversed(folder.absolute().parents[:4]):
            with suppress(OSError):
                os.close(os.open(place, os.O_RDONLY))
    try:
        content = (folder / str(rank)).read_bytes()
    except OSError:
        return None
    if token.encode() not in content[:100]:
        return None
    with suppress(ValueError):
        said = json.loads(content)
        return said if isinstance(said, dict) else {}
    return {}
