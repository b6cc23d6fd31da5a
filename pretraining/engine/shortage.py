"""How a shortage of memory shows."""

from __future__ import annotations

import torch

SHORTAGE = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""How CUDA, its libraries and a CPU say that there is no memory, where torch has no error of its own for it."""


def is_shortage(error: RuntimeError) -> bool:
    """Whether memory was asked for that is not there."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in SHORTAGE)
