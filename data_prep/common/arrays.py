"""NumPy arrays: the name that annotations have for them, the smallest type for a range of numbers, and gathering."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def smallest_type(largest: int) -> np.dtype[Any]:
    """Finds the smallest unsigned integer type that holds 0 … largest, so that files stay small."""
    return np.min_scalar_type(largest)


def ranges(starts: Array, lengths: Array) -> Array:
    """Joins the ranges start, start + 1, …, start + length - 1: indices that gather stretches of an array."""
    ends = np.cumsum(lengths)
    numbers: Array = np.repeat(starts - (ends - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers
