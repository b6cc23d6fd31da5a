"""The norm of a gradient, and the factor that brings it down to a limit."""

from __future__ import annotations

import torch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels

ROW = 1 << 14
"""Elements whose squares are added up in fp32 where our kernels are not; sums of rows are added up in fp64. PyTorch
on a CPU adds up all in fp32: the norm of 8 million elements is then 4e-4 off."""


def sum_of_squares(flat: Tensor) -> Tensor:
    """The squares of a flat tensor's elements, added up in fp64."""
    if kernels.usable(flat) and flat.dtype == torch.float32:
        added = torch.empty((), dtype=torch.float64)
        kernels.call("add_squares", flat.contiguous(), added, len(flat))
        return added
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    squares: Tensor = rows.square().sum() + rest.square()
    return squares


def clipping(norm: Tensor | float, limit: float) -> Tensor | float:
    """The factor that brings a gradient of this norm down to the limit, as PyTorch has it; 0 is no limit."""
    if not limit:
        return 1.0
    factor = limit / (norm + 1e-6)
    return factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(1.0, factor)
