"""Weights in 8 bits, with a scale for each output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Quantised(NamedTuple):
    """A weight as bytes, and what they stand for."""

    numbers: Tensor
    """(outputs, inputs) int8"""
    scales: Tensor
    """(outputs,) fp32: what a byte is multiplied by"""


def quantise(weight: Tensor) -> Quantised:
    """Rounds a weight to 8 bits; the largest number of an output is 127 times its scale."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return Quantised((weight / scales[:, None]).round().to(torch.int8), scales)
