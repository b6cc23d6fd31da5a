"""Histograms as the page draws them: bars that fit any width, with a few numbers below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.common.arrays import Array

MOST_BARS = 32
MOST_TICKS = 5
"""Numbers below a chart, for which a phone has room."""
LAST_TICK = 0.7
"""How far to the right such a number begins, in shares of the width, so that the one at the end has room."""


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its count, and its height in percent of the highest bar."""

    label: str
    count: int
    height: float


@dataclass(frozen=True)
class Tick:
    """A number below a chart."""

    label: str
    place: float
    """Where it stands, in percent of the width."""


@dataclass(frozen=True)
class Histogram:
    """A histogram: what its bars count, and of what."""

    counted: str
    bars: list[Bar]
    ticks: list[Tick]
    end: str
    """The number at the right end."""

    @property
    def highest(self) -> Bar:
        """The highest bar, the first of several."""
        return max(self.bars, key=lambda bar: bar.count)


def make_doubling_histogram(sizes: Array, counted: str) -> Histogram:
    """Counts sizes, from 1 on, in ranges each of which is twice as wide as the one before: 1, 2 to 3, 4 to 7, …"""
    exponents = np.frexp(sizes)[1] - 1
    counts = np.bincount(exponents).tolist()
    first = next(exponent for exponent, count in enumerate(counts) if count)
    ranges = [(2**exponent, 2 ** (exponent + 1) - 1) for exponent in range(first, len(counts))]
    return _histogram(counted, ranges, counts[first:])


def make_even_histogram(counts: Sequence[int], counted: str) -> Histogram:
    """Adds up the counts of every size, from 0 on, in some ranges of the same width."""
    last = len(counts) - 1
    width = max(1, -(-last // MOST_BARS))
    ranges = [(start, min(start + width - 1, last)) for start in range(1, last + 1, width)]
    return _histogram(counted, ranges, [sum(counts[start : end + 1]) for start, end in ranges])


def _histogram(counted: str, ranges: list[tuple[int, int]], counts: Sequence[int]) -> Histogram:
    """Makes the bars of ranges, and the numbers where some begin, and where the last ends."""
    most = max([*counts, 1])
    labels = [f"{start:,}" if start == end else f"{start:,} to {end:,}" for start, end in ranges]
    bars = [Bar(label, count, 100 * count / most) for label, count in zip(labels, counts, strict=True)]
    step = -(-len(ranges) // MOST_TICKS)
    places = [at for at in range(0, len(ranges), step) if at <= LAST_TICK * len(ranges)]
    ticks = [Tick(f"{ranges[at][0]:,}", 100 * at / len(ranges)) for at in places]
    return Histogram(counted, bars, ticks, f"{ranges[-1][1]:,}" if len(ranges) > 1 else "")
