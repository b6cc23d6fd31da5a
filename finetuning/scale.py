"""The scale of the numbers that a task asks for: a model learns them with mean 0 and spread 1, and says them as given.

Years from 1776 to 1912 would otherwise cost a fresh head thousands of steps to find their mean, and a loss of millions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from data_prep.common.arrays import Array


@dataclass(frozen=True)
class Scale:
    """Where numbers lie and how far apart; that of all other tasks than numbers changes nothing."""

    mean: float = 0.0
    spread: float = 1.0
    """Their standard deviation."""

    @classmethod
    def from_numbers(cls, numbers: Array) -> Scale:
        """The scale of the right answers to the training items, the same on all ranks."""
        exact = numbers.astype(np.float64)
        return cls(float(exact.mean()), float(exact.std()) or 1.0)

    def standardize(self, numbers: Tensor) -> Tensor:
        """The numbers on the scale on which a model learns them; fp32 would round large ones too much on the way."""
        return ((numbers.double() - self.mean) / self.spread).float()

    def unscale(self, learned: Tensor) -> Tensor:
        """The numbers as the task gives them, in fp32, for those that a head has learned."""
        return learned if self == Scale() else learned.float() * self.spread + self.mean

    def fold_into_head(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a model whose head says the numbers themselves, as every reader of its folder expects."""
        if self == Scale():
            return dict(weights)
        weight, bias = (weights[f"head.{end}"].double() * self.spread for end in ("weight", "bias"))
        return {**weights, "head.weight": weight.float(), "head.bias": (bias + self.mean).float()}
