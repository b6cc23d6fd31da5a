"""BERT for pre-training: the encoder, and the heads of an objective.

n pieces, s sequences, m predicted positions, H hidden. The heads compute on the m or s hidden states that they need.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.model.batch import PretrainingBatch
from pretraining.model.encoder import Encoder, Linear
from pretraining.model.fused import gelu, log_probabilities, loss_in_chunks, masked_loss
from pretraining.model.shape import Shape


class PieceHead(nn.Module):
    """Predicts pieces from hidden states; the decoder's weight is that of the word embeddings."""

    def __init__(self, shape: Shape, at_once: int | None = None):
        """`at_once`: the most predictions whose logits are in memory together; None for no limit."""
        super().__init__()
        self.at_once = at_once
        self.transform = Linear(shape.hidden, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, shape.epsilon)
        self.bias = nn.Parameter(torch.zeros(shape.padded_vocabulary))
        self.vocabulary = shape.vocabulary

    def transform_states(self, hidden: Tensor) -> Tensor:
        """Computes the input of the decoder, (m, H)."""
        return self.norm(gelu(self.transform(hidden), self.transform.bias))

    def logits(self, hidden: Tensor, decoder: Tensor) -> Tensor:
        """Computes the logits, (m, vocabulary)."""
        return F.linear(self.transform_states(hidden), decoder, self.bias)[:, : self.vocabulary]

    def log_probabilities(self, hidden: Tensor, decoder: Tensor, labels: Tensor) -> Tensor:
        """Computes the log-probabilities of the labels, (m,)."""
        return log_probabilities(self.transform_states(hidden), decoder, self.bias, labels, self.vocabulary)

    def forward(self, hidden: Tensor, decoder: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (self.transform_states(hidden), decoder, self.bias, labels, self.vocabulary)
        return masked_loss(*inputs) if self.at_once is None else loss_in_chunks(*inputs, self.at_once)


class ObjectiveOfModel(Protocol):
    """The methods of an objective that a model calls."""

    def build(self, shape: Shape) -> dict[str, nn.Module]: ...

    def needed_pieces(self, model: Bert, batch: PretrainingBatch) -> Tensor: ...

    def losses(self, model: Bert, seen: Tensor, batch: PretrainingBatch) -> Any: ...


class Bert(Encoder):
    """The encoder with the heads of an objective."""

    def __init__(self, shape: Shape, objective: ObjectiveOfModel, recompute: bool = False):
        super().__init__(shape, recompute)
        self.objective = objective
        for name, head in objective.build(shape).items():
            self.add_module(name, head)

    def head(self, name: str) -> Any:
        """Returns the head of this name."""
        return self.get_submodule(name)

    def forward(self, batch: PretrainingBatch) -> Any:
        """Returns the sums over the batch that the objective computes, as a named tuple."""
        return self.objective.losses(self, self.states_for_heads(batch), batch)

    def states_for_heads(self, batch: PretrainingBatch) -> Tensor:
        """Computes only the hidden states that the heads of the objective need."""
        return self.encode(batch, self.objective.needed_pieces(self, batch))
