"""Verdicts on the paper's claims, by a test over seeds, and the signal of a column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

from scipy import stats

from finetuning.results import JsonRecord

LEVEL = 0.05
"""The significance level."""
SPREADS = 2.0
"""The number of spreads by which a pre-trained model must exceed fresh weights."""
Judged = Literal["holds", "does not hold", "not sure", "nothing is claimed"]
"""Results of the test."""


class ClaimVerdict(JsonRecord):
    """The verdict on a claim in a column."""

    claim: str
    better: str
    """The row that is claimed to be better, or the first of two equal ones."""
    worse: str
    column: str
    finding: str
    """The result of the test, and its scope if it does not hold for all models."""
    why: str
    """The evidence, in words."""
    difference: float | None = None
    """The difference of the means, in the units shown."""
    interval: list[float] | None = None
    """The 95% confidence interval of the difference."""
    p: float | None = None
    """The p value."""


class SampleDifference(JsonRecord):
    """The result of Welch's test, which allows unequal variances."""

    difference: float
    low: float
    high: float
    p: float


def compute_spread(values: Sequence[float]) -> float | None:
    """Computes the standard deviation over seeds; None for a single one."""
    return stdev(values) if len(values) > 1 else None


def compare(first: Sequence[float], second: Sequence[float]) -> SampleDifference | None:
    """Compares two samples by Welch's test; None if one has a single seed, or neither has a variance."""
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
    """Judges whether the first sample is above the second or, with `within`, equal up to this distance."""
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
    """Whether a pre-trained model is two spreads above fresh weights. The spread is the largest of those over seeds and
    of the `errors` over items, since two seeds may be close by chance."""
    own = [each for each in (compute_spread(base), compute_spread(fresh)) if each is not None]
    widest = max([*own, *errors], default=math.inf)
    return fmean(base) - fmean(fresh) > SPREADS * widest
