"""Contests: sides take turns in one run, and every ratio compares turns of the same round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "cloze"
"""The name of our side; the prefix of their names if there are several."""


@dataclass(frozen=True)
class Turns:
    """Seconds of sides that took turns in one run. All ratios come from here: separate runs are not comparable."""

    seconds: Mapping[str, Sequence[float]]

    def compute_ratio(self, slower: str, faster: str) -> dict[str, float]:
        """Computes how many times as long one side took as another in each round: median, lowest and highest."""

        return spread([a / b for a, b in zip(self.seconds[slower], self.seconds[faster], strict=True)])

    def compute_ratios(self, side: str = OURS) -> dict[str, dict[str, float]]:
        """Computes how many times as fast as each other side this side was."""
        return {peer: self.compute_ratio(peer, side) for peer in self.seconds if peer != side}

    def summarise_side(self, side: str) -> dict[str, float]:
        """The seconds of a side: the median, the lowest and the highest."""
        return spread(self.seconds[side], digits=4)


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 0) -> Turns:
    """Lets all sides take turns, so that a disturbance affects all; the first `warm_up` turns do not count.

    A side that returns a float has measured its own seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name, take_turn in sides.items():
            start = time.perf_counter()
            said = take_turn()
            if number >= warm_up:
                seconds[name].append(said if isinstance(said, float) else time.perf_counter() - start)
    return Turns(seconds)


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Returns the median, the lowest and the highest value."""
    named = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, digits) for name, value in named.items()}
