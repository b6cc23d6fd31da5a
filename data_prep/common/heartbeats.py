"""Tells the ranks of a job what becomes of one another, by files in the folder that they share.

OUT/.cloze-work/ranks/NUMBER     one for each rank, which alone writes it: the token of the job, a count, and its end

Every rank counts in its own file. Rank 0 looks at all files and the others look at that of rank 0, so a rank that is
gone is found whatever the launcher does about it. A file of another token is of an earlier job. Only contents are
compared, by each host's own clock; and time in which this process could not look counts for nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.common.codes import Code

PERIOD = 2.0
"""Seconds between two looks, and between two counts."""
SOON = 0.1
"""Seconds between two looks at the beginning, when rank 0 usually appears soon."""
LOST = 40.0
"""Seconds without a new count after which a rank is gone."""
LONGEST_TEXT = 20_000
GONE = "gone: "  # how the text of a rank begins whose process ended without a word
CONTINUES = "the same command continues"

_supervisor: int | None = None
"""In a child: the pipe to the process that watches over it."""


def report_to(supervisor: int) -> None:
    """Has this process report through a pipe to the one that watches over it."""
    global _supervisor
    _supervisor = supervisor


def tell_supervisor(**message: Any) -> bool:
    """Tells the process that watches over this one, where there is one; returns whether there is."""
    if _supervisor is not None:
        with suppress(OSError):
            os.write(_supervisor, json.dumps(message).encode() + b"\n")
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
        self,
        folder: Path,
        token: str,
        rank: int,
        hosts: Sequence[str],
        lost: float = LOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Writes nothing yet; `hosts` has the names of the hosts that the ranks are on."""
        self._folder, self._token, self._rank, self._hosts, self._lost = folder, token, rank, hosts, lost
        self._clock, self._count, self._arrived = clock, 0, False
        self._others = range(1, len(hosts)) if rank == 0 else range(1)
        self._last: dict[int, dict[str, Any]] = {}
        self._silent = dict.fromkeys(self._others, 0.0)
        self._begun = self._looked = self._beat_at = clock()

    def begin(self) -> None:
        """Begins: rank 0 makes the folder for all, the others will wait until they see its file in it."""
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
            self._arrive()

    @property
    def pause(self) -> float:
        """Says after how many seconds to look again."""
        return SOON if not self._arrived and self._clock() - self._begun < 5 * PERIOD else PERIOD / 2

    def look(self) -> Verdict | None:
        """Counts on in the file of this rank; returns a verdict where another rank has ended or is gone.

        Nothing is said of files that are not there: not yet, or no more since the work is done.
        """
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * PERIOD), now
        if not self._arrived:
            if self._read(0) is not None:
                self._arrive()
            return None
        if now - self._beat_at >= PERIOD / 2:
            self._beat_at = now
            self._write({})
        for rank in self._others:
            if (verdict := self._look_at(rank, passed)) is not None:
                return verdict
        return None

    def missing(self) -> list[int]:
        """Lists the ranks whose files rank 0 does not see."""
        return [rank for rank in self._others if self._read(rank) is None]

    def end(self, code: int, text: str) -> bool:
        """Notes the end of this rank in its file; returns whether that was possible."""
        return self._arrived and self._write({"code": code, "text": text[-LONGEST_TEXT:]})

    def wait(self) -> Verdict | None:
        """Waits until rank 0 has ended because of this rank, and says how, where that is known."""
        deadline = self._clock() + self._lost
        while self._clock() < deadline:
            if (verdict := self._look_at(0, PERIOD / 4)) is not None:
                return verdict
            if self._read(0) is None:
                return None
            time.sleep(PERIOD / 4)
        return None

    def _look_at(self, rank: int, passed: float) -> Verdict | None:
        said, name = self._read(rank), f"rank {rank} on {self._hosts[rank]}"
        if said is None:
            self._silent[rank] = 0.0
            return None
        code, text = said.get("code"), str(said.get("text", ""))
        if isinstance(code, int) and code:
            return Verdict("" if self._rank else self._named(name, text), code)
        self._silent[rank] = 0.0 if said != self._last.get(rank) else self._silent[rank] + passed
        self._last[rank] = said
        if self._silent[rank] < self._lost:
            return None
        text = f"error: {name} is gone (nothing was heard of it for {self._lost:.0f} s); {CONTINUES}"
        return Verdict(text if self._rank < 2 else "", Code.RANK_LOST)

    @staticmethod
    def _named(name: str, text: str) -> str:
        if text.startswith(GONE):
            return f"error: {name} is gone ({text.removeprefix(GONE)}); {CONTINUES}"
        return f"error: {name}: {text}" if text else f"error: {name} has ended; {CONTINUES}"

    def _arrive(self) -> None:
        """Makes the file of this rank, by which rank 0 sees that both see the same folder.

        It is there as a whole or not at all: of a rank that was killed meanwhile an empty file would say nothing.
        """
        path = self._path(self._rank)
        with suppress(OSError):
            path.with_suffix(".new").write_bytes(self._content({}))
            path.with_suffix(".new").replace(path)
            self._arrived = True

    def _write(self, said: dict[str, Any]) -> bool:
        """Writes the file of this rank where it is still there: once the work is done, the folder goes."""
        self._count += 1
        try:
            with self._path(self._rank).open("r+b") as file:
                file.write(self._content(said))
                file.truncate()
        except OSError:
            return False
        return True

    def _content(self, said: dict[str, Any]) -> bytes:
        return json.dumps({"token": self._token, "count": self._count, **said}).encode()

    def _path(self, rank: int) -> Path:
        return self._folder / str(rank)

    def _read(self, rank: int) -> dict[str, Any] | None:
        """Reads what a rank of this job says in its file: nothing where it is just being written.

        NFS asks its server anew for a folder that is opened."""
        if not self._arrived:
            for folder in reversed(self._folder.absolute().parents[:4]):
                with suppress(OSError):
                    os.close(os.open(folder, os.O_RDONLY))
        try:
            content = self._path(rank).read_bytes()
        except OSError:
            return None
        if self._token.encode() not in content[:100]:
            return None
        with suppress(ValueError):
            said = json.loads(content)
            return said if isinstance(said, dict) else {}
        return {}
