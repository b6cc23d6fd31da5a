"""What an objective costs: weights and operations of its heads, its predictions, and its passes through encoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from pretraining.architectures.declaration import count_head_products, find_architecture
from pretraining.architectures.weights import Weight, count_parameters, count_products
from pretraining.model.shape import PIECE_HEAD, Shape


class Pass(NamedTuple):
    """A pass of a batch through an encoder, as the planner counts it."""

    shape: Shape
    """that of the encoder: the model's, or a smaller one's that is part of the heads"""
    needed: float
    """number of the pieces whose last hidden states are read"""
    share: float = 1.0
    """share of the sequences that pass"""
    flops: float = 0.0
    """useful operations of heads on these states, forward, besides those that `Objective.flops` counts"""
    kept: float = 0.0
    """numbers that heads keep of these states until the backward pass, besides those of predicted pieces"""


class ObjectiveCosts(ABC):
    """The part of an objective that memory, automatic micro-batches and hours follow from."""

    @abstractmethod
    def heads(self, shape: Shape) -> dict[str, str]:
        """Returns the names of the modules that it adds to an encoder, in order, with their display names."""

    @abstractmethod
    def predictions(self, length: Any, masked: Any, done: float) -> Any:
        """Counts the predicted pieces of sequences of this length with this number of masks; both may be arrays.

        `done` is the share of a run's steps that is done; from 0 to 1 the count only grows or only falls.
        """

    def most_predictions(self, length: int, masked: int) -> int:
        """Counts the most pieces that a sequence of this length with this number of masks predicts, at any step."""
        return max(int(self.predictions(length, masked, done)) for done in (0.0, 1.0))

    def parameters(self, shape: Shape) -> int:
        """Counts the parameters of the heads, by default those that are declared, without those that pad the
        vocabulary."""
        declared = sum(count_parameters(weights) for weights in self._declared_heads(shape).values())
        return declared + count_parameters(self.own_weights(shape))

    def own_weights(self, shape: Shape) -> Sequence[Weight]:  # noqa: ARG002
        """Declares weights of heads that no architecture has, in the order of the model's parameters."""
        return []

    def flops(self, shape: Shape, sequences: int, predictions: float) -> float:
        """Counts the useful operations of the heads that the architecture declares, forward: only matrix products."""
        total = 0.0
        for name, weights in self._declared_heads(shape).items():
            pieces = name == PIECE_HEAD
            total += predictions * count_head_products(shape) if pieces else sequences * count_products(weights)
        return total

    def _declared_heads(self, shape: Shape) -> dict[str, list[Weight]]:
        declared = find_architecture(shape.architecture).heads(shape)
        return {name: declared[name] for name in self.heads(shape) if name in declared}

    def num_needed(self, shape: Shape, sequences: int, predictions: float) -> float:  # noqa: ARG002
        """Counts the needed pieces of a batch."""
        return predictions

    def passes(self, shape: Shape, sequences: int, pieces: float, predictions: float) -> list[Pass]:  # noqa: ARG002
        """Lists the passes of a batch of so many sequences, pieces and predictions: by default one through the model,
        of which the heads read `num_needed` pieces."""
        return [Pass(shape, self.num_needed(shape, sequences, predictions))]
