"""What ranks say of themselves while they work, and who of them is gone or hangs by that."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from pretraining.processes.group import LOOK_WHY, as_lost, name_ranks


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself at each beat."""

    count: int = 0
    """of its beats"""
    marks: int = 0
    paused: bool = False
    lost: str = ""
    """the error of an operation of all ranks that failed here, because of another rank"""

    def encode(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def decode(cls, text: bytes) -> Beat:
        return cls(*json.loads(text))


class Judge:
    """Hears the ranks' beats, and says which of them are gone or hang."""

    def __init__(self, every: float, silence: float, hang: float) -> None:
        self._late, self._silence, self._hang = 2.5 * every, silence, hang
        self._beats: dict[int, Beat] = {}
        self._quiet: dict[int, float] = {}
        """seconds since each rank's last beat"""
        self._still = 0.0
        """seconds since any rank's last mark"""
        self._parted = 0.0
        """seconds since a rank first said that it had lost another"""

    def hear(self, beats: Mapping[int, Beat], passed: float) -> None:
        """Takes the beats as they are, `passed` seconds after the last call."""
        before = {rank: self._beats.get(rank, Beat()) for rank in beats}
        self._quiet = {
            rank: 0.0 if beat.count != before[rank].count else self._quiet.get(rank, 0.0) + passed
            for rank, beat in beats.items()
        }
        moved = any(beat.marks != before[rank].marks for rank, beat in beats.items())
        waits = any(beat.marks for beat in beats.values()) and not any(beat.paused for beat in beats.values())
        self._still = self._still + passed if waits and not moved else 0.0
        self._parted += passed if any(beat.lost for beat in before.values()) else 0.0
        self._beats = dict(beats)

    def verdict(self) -> str | None:
        """What has failed, if anything has."""
        return self._find_lost() or self._find_gone() or self._find_hanging()

    def silent(self) -> list[int]:
        """The ranks that are gone, even if nobody has missed them."""
        if max(self._quiet.values(), default=0.0) < self._silence:
            return []
        return [rank for rank, quiet in self._quiet.items() if quiet >= self._silence - self._late]

    def late(self) -> list[int]:
        """The ranks that may be gone."""
        return [rank for rank, quiet in self._quiet.items() if quiet >= self._late]

    def _find_lost(self) -> str | None:
        """Whom those have lost that say so. One that says it is no cause of it, even if its next beat is late."""
        if self._parted < self._late:
            return None
        suspects = [rank for rank, beat in self._beats.items() if not beat.lost]
        if gone := [rank for rank in suspects if rank in self.late()]:
            return say_gone(gone)
        reasons = [beat.lost for beat in self._beats.values() if beat.lost]
        if suspects and any("timed out" in reason.lower() for reason in reasons):
            return f"{name_ranks(suspects)} did not come to where the others wait\n{LOOK_AT_STACK}"
        return str(as_lost(reasons[0]))

    def _find_gone(self) -> str | None:
        silent = self.silent()
        return say_gone(silent) if silent else None

    def _find_hanging(self) -> str | None:
        if self._still < self._hang:
            return None
        marks = {rank: beat.marks for rank, beat in self._beats.items()}
        last = [rank for rank, count in marks.items() if count == min(marks.values())]
        long = f"{self._hang / 60:.0f} min" if self._hang >= 60 else f"{self._hang:.0f} s"
        if len(last) == len(marks):
            return f"no rank has moved for {long}\n{LOOK_AT_STACK}"
        has, hangs, it = ("have", "they hang", "them") if len(last) > 1 else ("has", "it hangs", "it")
        return f"{name_ranks(last)} {has} not moved for {long}: {hangs}, and the others wait for {it}\n{LOOK_AT_STACK}"


LOOK_AT_STACK = (
    "its machine's log may say why; if it happens again: py-spy dump --pid <process> shows where it is\n"
    "the same command goes on from the last checkpoint"
)


def say_gone(ranks: Sequence[int]) -> str:
    """That these ranks do not beat any more."""
    has = "have" if len(ranks) > 1 else "has"
    return f"{name_ranks(ranks)} {has} ended, or cannot be reached any more\n{LOOK_WHY}"


class Stopwatch:
    """Seconds from call to call. Of a time in which this process was itself stopped or starved only the `most` counts:
    it tells nothing of the others."""

    def __init__(self, most: float) -> None:
        self._most, self._before = most, time.monotonic()

    def passed(self) -> float:
        before, self._before = self._before, time.monotonic()
        return min(self._before - before, self._most)
