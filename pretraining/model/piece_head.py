"""The head that predicts pieces, whose decoder is the table of word embeddings.

m predicted positions, H hidden.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.mesh.mesh import ALONE, Mesh, copy_to_tensor_ranks
from pretraining.model.losses import log_probabilities, loss_in_chunks, masked_loss
from pretraining.model.shape import Shape


class PieceHead(nn.Module):
    """Predicts pieces from hidden states as they are. Architectures with a transform or a bias derive from it."""

    bias: Tensor | None
    """of the decoder, for the padded vocabulary"""
    mesh: Mesh = ALONE
    """the ranks that share the decoder"""

    def __init__(self, shape: Shape, at_once: int | None = None):
        """`at_once`: the most predictions whose logits are in memory together; None for no limit."""
        super().__init__()
        self.at_once, self.vocabulary = at_once, shape.vocabulary
        self.register_parameter("bias", None)

    def transform_states(self, hidden: Tensor) -> Tensor:
        """Computes the input of the decoder, (m, H)."""
        return hidden

    def logits(self, hidden: Tensor, decoder: Tensor) -> Tensor:
        """Computes the logits, (m, vocabulary)."""
        return F.linear(self.transform_states(hidden), decoder, self.bias)[:, : self.vocabulary]

    def log_probabilities(self, hidden: Tensor, decoder: Tensor, labels: Tensor) -> Tensor:
        """Computes the log-probabilities of the labels, (m,)."""
        return log_probabilities(*self._decode(hidden, decoder), labels, self.vocabulary, self.mesh)

    def forward(self, hidden: Tensor, decoder: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (*self._decode(hidden, decoder), labels, self.vocabulary)
        if self.at_once is None:
            return masked_loss(*inputs, self.mesh)
        return loss_in_chunks(*inputs, self.at_once, self.mesh)

    def _decode(self, hidden: Tensor, decoder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = decoder.new_zeros(len(decoder)) if self.bias is None else self.bias
        return copy_to_tensor_ranks(self.transform_states(hidden), self.mesh), decoder, bias
