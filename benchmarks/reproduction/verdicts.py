"""Whether the orderings that the paper claims hold, by a test over seeds; and whether a column says anything at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

from scipy import stats

from finetuning.results import JsonRecord

LEVEL = 0.05
"""The chance of finding a difference where there is none that is taken."""
SPREADS = 2.0
"""Spreads by which a pre-trained model must be above fresh weights."""
Judged = Literal["holds", "does not hold", "not sure", "nothing is claimed"]
"""What a test finds, whatever its seeds are of."""


class ClaimVerdict(JsonRecord):
    """What was found of a claim in a column."""

    claim: str
    better: str
    """The row that is claimed to be better, or the first of two that are alike."""
    worse: str
    column: str
    finding: str
    """What the test finds, and of which models where it cannot speak of all."""
    why: str
    """How sure it is, in words."""
    difference: float | None = None
    """By how much the one is better, in the units shown."""
    interval: list[float] | None = None
    """Between what the difference lies, at 95%."""
    p: float | None = None
    """The chance of such a difference where there is none."""


class SampleDifference(JsonRecord):
    """Two samples beside each other, by Welch's test: they need not spread alike."""

    difference: float
    low: float
    high: float
    p: float


def compute_spread(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds; None where there is one alone."""
    return stdev(values) if len(values) > 1 else None


def compare(first: Sequence[float], second: Sequence[float]) -> SampleDifference | None:
    """By how much the first are above the second; None where nobody knows what chance may do: one of them has a single
    seed, or neither spreads."""
    if min(len(first), len(second)) < 2 or stdev(first) == stdev(second) == 0:
        return None
    found = stats.ttest_ind(first, second, equal_var=False)
    between = found.confidence_interval(1 - LEVEL)
    difference = fmean(first) - fmean(second)
    return SampleDifference(
        difference=difference, low=float(between.low), high=float(between.high), p=float(found.pvalue)
    )


def judge(
    first: Sequence[float], second: Sequence[float], within: float | None = None
) -> tuple[Judged, str, SampleDifference | None]:
    """Whether the first are above the second, or, `within` a distance, alike; and how sure that is."""
    found = compare(first, second)
    if found is None:
        why = "one seed" if min(len(first), len(second)) < 2 else "no spread"
        return "nothing is claimed", f"{why}: {fmean(first) - fmean(second):+.1f}", None
    if within is not None:
        told = f"between {found.low:+.1f} and {found.high:+.1f}"
        if -within < found.low and found.high < within:
            return "holds", told, found
        return ("does not hold" if found.low > within or found.high < -within else "not sure"), told, found
    told = f"{found.difference:+.1f}, p = {found.p:.2g}, {found.low:+.1f} to {found.high:+.1f}"
    if found.p >= LEVEL:
        return "not sure", told, found
    return ("holds" if found.difference > 0 else "does not hold"), told, found


def has_signal(base: Sequence[float], fresh: Sequence[float], errors: Sequence[float]) -> bool:
    """Whether a pre-trained model is two spreads above fresh weights. The spread is the largest of those of both over
    seeds and of the `errors` by the choice of items, since two seeds may be alike by chance."""
    own = [each for each in (compute_spread(base), compute_spread(fresh)) if each is not None]
    widest = max([*own, *errors], default=math.inf)
    return fmean(base) - fmean(fresh) > SPREADS * widest
