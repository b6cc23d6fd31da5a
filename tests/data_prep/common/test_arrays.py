"""Ranges of numbers beside a plain loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.common.arrays import ranges


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5))))
def test_ranges_follow_one_another(given_ranges: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(given_ranges, np.int64).reshape(-1, 2).T
    expected = [number for start, length in given_ranges for number in range(start, start + length)]
    assert ranges(starts, lengths).tolist() == expected
