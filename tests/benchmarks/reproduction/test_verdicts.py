"""Claims are judged by a test over seeds, and columns without a signal claim nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from benchmarks.reproduction.verdicts import LEVEL, compare, compute_spread, has_signal, judge

VALUES = some.lists(some.floats(0, 100).map(lambda value: round(value, 2)), min_size=2, max_size=6)


@given(VALUES, VALUES)
def test_two_samples_are_compared_as_welch_did(first: list[float], second: list[float]) -> None:
    """Against his formulas: the standard error, his degrees of freedom, and Student's distribution."""
    found = compare(first, second)
    parts = [np.var(each, ddof=1) / len(each) for each in (first, second)]
    if len({*first}) == len({*second}) == 1:
        assert found is None
        return
    assert found is not None
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True)
    )
    error = np.sqrt(sum(parts))
    difference = np.mean(first) - np.mean(second)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(difference) / error, freedom), abs=1e-9)
    reach = stats.t.ppf(1 - LEVEL / 2, freedom) * error
    assert (found.low, found.high) == pytest.approx((difference - reach, difference + reach), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "finding"),
    [
        ([80.0, 80.2, 80.1], [75.0, 75.3, 75.1], "holds"),
        ([75.0, 75.3, 75.1], [80.0, 80.2, 80.1], "does not hold"),
        ([80.0, 84.0, 76.0], [79.0, 83.0, 77.0], "not sure"),
        ([80.0], [70.0], "nothing is claimed"),
        ([80.0, 80.1], [70.0], "nothing is claimed"),
        ([80.0, 80.0], [70.0, 70.0], "nothing is claimed"),  # two seeds alike by chance prove nothing
    ],
)
def test_an_ordering(first: list[float], second: list[float], finding: str) -> None:
    assert judge(first, second)[0] == finding


@pytest.mark.parametrize(
    ("first", "second", "finding"),
    [
        ([80.0, 80.2, 80.1], [80.1, 80.2, 80.0], "holds"),
        ([80.0, 80.2, 80.1], [70.1, 70.2, 70.0], "does not hold"),
        ([80.0, 84.0, 76.0], [79.0, 83.0, 77.0], "not sure"),
    ],
)
def test_rows_that_are_alike(first: list[float], second: list[float], finding: str) -> None:
    assert judge(first, second, within=1.0)[0] == finding


def test_one_seed_claims_nothing_and_says_so() -> None:
    assert judge([80.0], [70.5])[1] == "one seed: +9.5"
    assert compute_spread([1.0]) is None


def test_seeds_that_are_all_alike_claim_nothing() -> None:
    assert judge([80.0] * 3, [70.0] * 3)[:2] == ("nothing is claimed", "no spread: +10.0")


@pytest.mark.parametrize(
    ("base", "fresh", "errors", "signal"),
    [
        ([80.0, 81.0], [50.0, 51.0], [], True),
        ([52.0, 54.0], [50.0, 51.0], [], False),
        ([52.0, 52.0], [50.0, 50.0], [1.5], False),  # alike by chance, while the items say less
        ([80.0], [50.0], [1.5], True),
        ([80.0], [50.0], [], False),  # nobody knows how far they may be
    ],
)
def test_a_signal_is_two_spreads_above_fresh_weights(
    base: list[float], fresh: list[float], errors: list[float], signal: bool
) -> None:
    assert has_signal(base, fresh, errors) is signal
