"""The scale of a task's scores: a model learns them with mean 0 and spread 1, and predicts them on their own scale.

A fresh head would otherwise need thousands of steps to find the mean of years from 1776 to 1912.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from data_prep.common.arrays import Array


@dataclass(frozen=True)
class ScoreScale:
    """The mean and spread of scores; the default changes nothing."""

    mean: float = 0.0
    spread: float = 1.0
    """Their standard deviation."""

    @classmethod
    def from_numbers(cls, numbers: Array) -> ScoreScale:
        """Computes the scale of the training scores, the same on all ranks."""
        exact = numbers.astype(np.float64)
        return cls(float(exact.mean()), float(exact.std()) or 1.0)

    def standardize(self, numbers: Tensor) -> Tensor:
        """Converts scores to the learned scale, in fp64 on the way: fp32 would round large ones too much."""
        return ((numbers.double() - self.mean) / self.spread).float()

    def unscale(self, learned: Tensor) -> Tensor:
        """Converts a head's outputs to the scale of the task, in fp32."""
        return learned if self == ScoreScale() else learned.float() * self.spread + self.mean

    def fold_into_head(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns weights with the scale folded into the head, so that it predicts on the scale of the task."""
        if self == ScoreScale():
            return dict(weights)
        weight, bias = (weights[f"head.{end}"].double() * self.spread for end in ("weight", "bias"))
        return {**weights, "head.weight": weight.float(), "head.bias": (bias + self.mean).float()}
