"""Weights in 8 bits, with a scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight to 8 bits: int8 numbers, (outputs, inputs), and the fp32 scale of each output, (outputs,). The
    largest number of an output is 127 times its scale."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round().to(torch.int8), scales
