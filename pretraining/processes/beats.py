"""Finds the ranks that are gone or hang, from the beats of all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from data_prep.common.errors import LOST_WHY, LostError, name_ranks

HURRY = 15.0
"""Seconds of silence for which torchrun, which has asked ranks to stop, leaves them time: it kills them after 30."""
START = 7200.0
"""Seconds that ranks have for their first step, at least."""
HANG_WHY = "its machine's log may say why\nthe same command goes on from the last checkpoint"


class Beat(NamedTuple):
    """A sign of life that a rank gives every second or so."""

    number: int = 0
    """Number of this beat: a rank is silent where it does not grow."""
    marks: int = 0
    """Number of times that its work came to a place where it waits for others: a rank hangs where it does not grow."""
    paused: bool = False
    """Whether it does long work that makes no marks."""
    lost: str = ""
    """Error of a collective operation that failed on this rank, because another one is gone."""


class RankMonitor:
    """Takes the beats of ranks, and decides which ranks are gone and which hang.

    A rank is late after `every` seconds two and a half times, and silent, which means gone, after `silence` seconds.
    Ranks hang if nobody has made a mark for `hang` seconds, before the first one for two hours at least, in which ranks
    connect and memory is tried out; those with the fewest marks keep the others waiting.
    """

    def __init__(self, every: float, silence: float, hang: float) -> None:
        self._late, self._silence, self._hang = 2.5 * every, silence, hang
        self._beats: dict[int, Beat] = {}
        self._quiet: dict[int, float] = {}
        """Seconds since the last new beat, by rank."""
        self._still = 0.0
        """Seconds since any rank made a mark."""
        self._parted = 0.0
        """Seconds since a rank first reported that it had lost another."""

    def add(self, beats: Mapping[int, Beat], passed: float) -> None:
        """Takes the beats as they are now, `passed` seconds after the last call."""
        before = {rank: self._beats.get(rank, Beat()) for rank in beats}
        beats = {rank: max(before[rank], beat, key=lambda each: each.number) for rank, beat in beats.items()}
        self._quiet = {
            rank: 0.0 if beat.number != before[rank].number else self._quiet.get(rank, 0.0) + passed
            for rank, beat in beats.items()
        }
        moved = any(beat.marks != before[rank].marks for rank, beat in beats.items())
        works = not any(beat.paused for beat in beats.values())
        self._still = self._still + passed if works and not moved else 0.0
        self._parted += passed if any(beat.lost for beat in before.values()) else 0.0
        self._beats = dict(beats)

    def shorten_silence(self, lost: bool) -> None:
        """Takes ranks for gone sooner, since this one was asked to stop and will be killed; where it has `lost` another
        in an operation, as soon as they are late for sure."""
        self._silence = min(self._silence, max(0.0 if lost else HURRY, 2 * self._late))

    def find_failure(self) -> str | None:
        """Returns what has failed, in words for the user; None where all is well."""
        if self._parted >= self._late:  # by now, those that live have beaten once more
            return self._explain_loss()
        if silent := self.list_silent():
            return say_gone(silent)
        return self._explain_hang() if self._still >= self._patience else None

    @property
    def _patience(self) -> float:
        """Seconds without a mark after which ranks hang."""
        return self._hang if any(beat.marks for beat in self._beats.values()) else max(self._hang, START)

    def list_silent(self) -> list[int]:
        """Lists the ranks that are gone, even if no other rank has missed them in an operation."""
        if max(self._quiet.values(), default=0.0) < self._silence:
            return []
        return [rank for rank, quiet in self._quiet.items() if quiet >= self._silence - self._late]

    def list_late(self) -> list[int]:
        """Lists the ranks whose beat is overdue, and which may be gone."""
        return [rank for rank, quiet in self._quiet.items() if quiet >= self._late]

    def _explain_loss(self) -> str:
        """Names the ranks that others have lost. A rank that has lost another is not the cause, even if it is late."""
        suspects = [rank for rank, beat in self._beats.items() if not beat.lost]
        if gone := [rank for rank in suspects if rank in self.list_late()]:
            return say_gone(gone)
        reasons = [beat.lost for beat in self._beats.values() if beat.lost]
        if suspects and any("timed out" in reason.lower() for reason in reasons):
            return f"{name_ranks(suspects)} did not come to where the others wait\n{HANG_WHY}"
        return str(LostError(reasons[0]))

    def _explain_hang(self) -> str:
        """Names the ranks for which the others wait, unless all stand at the same place."""
        fewest = min(beat.marks for beat in self._beats.values())
        last = [rank for rank, beat in self._beats.items() if beat.marks == fewest]
        patience = self._patience
        long = f"{patience / 60:.0f} min" if patience >= 60 else f"{patience:.0f} s"
        if len(last) == len(self._beats):
            return f"no rank has moved for {long}\n{HANG_WHY}"
        return f"the others wait for {name_ranks(last)}, which did not move for {long}\n{HANG_WHY}"


def say_gone(ranks: Sequence[int]) -> str:
    """The message that these ranks give no more beats."""
    has = "have" if len(ranks) > 1 else "has"
    return f"{name_ranks(ranks)} {has} ended, or cannot be reached any more\n{LOST_WHY}"


class LapTimer:
    """Measures the seconds from call to call, and counts at most `most` of them: in a longer time this process was
    itself stopped or starved, which tells nothing of the other ranks."""

    def __init__(self, most: float) -> None:
        self._most, self._before = most, time.monotonic()

    def lap(self) -> float:
        before, self._before = self._before, time.monotonic()
        return min(self._before - before, self._most)
