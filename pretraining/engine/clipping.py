"""The norm of a gradient, and the factor that brings it down to a limit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels

ROW = 1 << 14
"""Without our kernels, the squares of this many elements are added up in fp32, and these sums in fp64. PyTorch on a CPU
adds up all in fp32, which makes the norm of 8 million elements 4e-4 wrong."""


def add_squares(flat: Tensor) -> Tensor:
    """Adds up the squares of a flat tensor's elements in fp64."""
    if kernels.usable(flat) and flat.dtype == torch.float32:
        added = torch.empty((), dtype=torch.float64)
        kernels.call("add_squares", flat.contiguous(), added, len(flat))
        return added
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    squares: Tensor = rows.square().sum() + rest.square()
    return squares


def find_clip_factor(norm: Tensor | float, limit: float) -> Tensor | float:
    """Computes the factor that clips a gradient of this norm to the limit, as PyTorch does; a limit of 0 is none.

    For a norm on a device that is not finite the factor is NaN, and the optimizer moves nothing.
    """
    if isinstance(norm, Tensor):
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
        return torch.where(norm.isfinite(), factor, math.nan)
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
