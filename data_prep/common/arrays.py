"""Types of NumPy arrays: the name that annotations have for them, and the smallest that holds a range of numbers."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def smallest_type(largest: int) -> np.dtype[Any]:
    """Finds the smallest unsigned integer type that holds 0 … largest, so that files stay small."""
    return np.min_scalar_type(largest)
