"""Claims are judged by a test over seeds, and columns without a signal claim nothing."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from benchmarks.reproduction.results import LEVEL, compare_samples, compute_spread, has_signal

VALUES = some.lists(some.floats(0, 100).map(lambda value: round(value, 2)), min_size=2, max_size=6)


@given(VALUES, VALUES)
def test_two_samples_are_compared_as_welch_did(first: list[float], second: list[float]) -> None:
    """Against his formulas: the standard error, his degrees of freedom, and Student's distribution."""
    found = compare_samples(first, second)
    parts = [np.var(each, ddof=1) / len(each) for each in (first, second)]
    squares = [part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True)]
    if len({*first}) == len({*second}) == 1:
        assert found.finding == "nothing is claimed"
        return
    freedom, error = sum(parts) ** 2 / sum(squares), np.sqrt(sum(parts))
    difference = np.mean(first) - np.mean(second)
    p, reach = 2 * stats.t.sf(abs(difference) / error, freedom), stats.t.ppf(1 - LEVEL / 2, freedom) * error
    shown = [float(each) for each in re.findall(r"[-+]?\d[\d.]*(?:e-\d+)?", found.why)]
    assert shown[1] == pytest.approx(p, rel=0.051, abs=1e-9)  # two digits
    assert shown[::2] + shown[3:] == pytest.approx([difference, difference - reach, difference + reach], abs=0.051)


HIGH, LOW, MIDDLE = [80.0, 80.2, 80.1], [75.0, 75.3, 75.1], ([80.0, 84.0, 76.0], [79.0, 83.0, 77.0])


@pytest.mark.parametrize(
    ("first", "second", "within", "finding", "why"),
    [
        (HIGH, LOW, None, "holds", "+5.0, p = "),
        (LOW, HIGH, None, "does not hold", "-5.0, p = "),
        (*MIDDLE, None, "not sure", "+0.3, p = 0.91"),
        ([80.0], [70.5], None, "nothing is claimed", "one seed: +9.5"),
        ([80.0, 80.1], [70.0], None, "nothing is claimed", "one seed"),
        ([80.0] * 3, [70.0] * 2, None, "nothing is claimed", "no spread: +10.0"),  # alike by chance proves nothing
        (HIGH, [80.1, 80.2, 80.0], 1.0, "holds", "between "),
        (HIGH, [70.1, 70.2, 70.0], 1.0, "does not hold", "between "),
        (*MIDDLE, 1.0, "not sure", "between "),
    ],
)
def test_an_ordering_or_a_likeness(
    first: list[float], second: list[float], within: float | None, finding: str, why: str
) -> None:
    found = compare_samples(first, second, within)
    assert found.finding == finding
    assert found.why.startswith(why)


SIGNALS = [
    ([80.0, 81.0], [50.0, 51.0], [], True),
    ([52.0, 54.0], [50.0, 51.0], [], False),
    ([52.0, 52.0], [50.0, 50.0], [1.5], False),  # alike by chance, while the items say less
    ([80.0], [50.0], [1.5], True),
    ([80.0], [50.0], [], False),  # nobody knows how far they may be
]


def test_a_signal_is_two_spreads_above_fresh_weights() -> None:
    for base, fresh, errors, signal in SIGNALS:
        assert has_signal(base, fresh, errors) is signal, (base, fresh, errors)
    assert compute_spread([1.0]) is None
