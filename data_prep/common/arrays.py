"""The one name for a NumPy array of any type, and the smallest type for a range."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def smallest_type(largest: int) -> np.dtype[Any]:
    """The smallest unsigned integer type that holds 0 … largest."""
    return np.min_scalar_type(largest)
