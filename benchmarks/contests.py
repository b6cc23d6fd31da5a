"""The kit for contests: sides take turns in the same run, and all ratios are of turns of the same round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.common.errors import UserError

OURS = "cloze"
"""What our side is called; where we take part several times, how all the names of ours begin."""


@dataclass(frozen=True)
class Turns:
    """Seconds of sides that took turns in one run. Ratios come from nowhere else: what ran apart is not comparable."""

    seconds: Mapping[str, Sequence[float]]

    def compute_ratio(self, slower: str, faster: str) -> dict[str, float]:
        """How many times as long one side took as another, round by round: the median, the lowest and the highest."""
        if missing := [name for name in (slower, faster) if name not in self.seconds]:
            raise UserError(
                f"{missing[0]} took no turns with {', '.join(self.seconds) or 'anybody'}: measure both in one run"
            )
        return spread([a / b for a, b in zip(self.seconds[slower], self.seconds[faster], strict=True)])

    def compute_ratios(self, side: str = OURS) -> dict[str, dict[str, float]]:
        """How many times as fast as each of the peers a side of ours was."""
        return {peer: self.compute_ratio(peer, side) for peer in self.seconds if peer != side}

    def summarise_side(self, side: str) -> dict[str, float]:
        """The seconds of a side: the median, the lowest and the highest."""
        return spread(self.seconds[side], digits=4)


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 0) -> Turns:
    """Lets all sides take turns, so that what disturbs one disturbs all; the first turns of each warm it up.

    A side that returns a float has measured its seconds by its own clock.
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
    """The median of some values, the lowest and the highest of them."""
    named = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, digits) for name, value in named.items()}
