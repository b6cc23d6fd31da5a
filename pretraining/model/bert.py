"""BERT as it is pre-trained: the encoder, and the two heads that it learns from.

n pieces, s sequences, m predicted positions, H hidden. The heads see the m or s states that they are about, no others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.encoder import Encoder, Linear
from pretraining.model.fused import gelu, masked_loss
from pretraining.model.shape import Shape


class Losses(NamedTuple):
    """The losses of pre-training and the right predictions, each summed over a batch."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    next_sentence: Tensor
    """cross-entropy of whether B follows A"""
    masked_correct: Tensor
    next_sentence_correct: Tensor


def pretraining_loss(losses: Losses, batches: PretrainingBatches) -> Tensor:
    """This micro-batch's part of the loss of the global batch: exact for any ranks and micro-batches."""
    return losses.masked / max(batches.predictions, 1) + losses.next_sentence / batches.sequences


class MaskedHead(nn.Module):
    """Predicts what stood at a masked position; the decoder's weight is that of the word embeddings."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.transform = Linear(shape.hidden, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, shape.epsilon)
        self.bias = nn.Parameter(torch.zeros(shape.padded_vocabulary))
        self.vocabulary = shape.vocabulary

    def transformed(self, hidden: Tensor) -> Tensor:
        """(m, H): what the decoder multiplies."""
        return self.norm(gelu(self.transform(hidden), self.transform.bias))

    def forward(self, hidden: Tensor, decoder: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return masked_loss(self.transformed(hidden), decoder, self.bias, labels, self.vocabulary)


class Bert(Encoder):
    """The encoder with the heads of masked pieces and of next sentences."""

    def __init__(self, shape: Shape, recompute: bool = False):
        super().__init__(shape, recompute)
        self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.masked_head = MaskedHead(shape)
        self.next_head = nn.Linear(shape.hidden, 2)

    def forward(self, batch: PretrainingBatch) -> Losses:
        hidden = self.encode(batch)
        masked, masked_correct = self.masked_head(hidden[batch.chosen], self.embeddings.word.weight, batch.labels)
        logits = self._next_sentence_logits(hidden, batch).float()
        next_sentence = F.cross_entropy(logits, batch.random_next, reduction="sum")
        return Losses(masked, next_sentence, masked_correct, (logits.argmax(1) == batch.random_next).sum())

    def heads(self, hidden: Tensor, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Computes the logits of both heads: (m, vocabulary) and (s, 2)."""
        transformed = self.masked_head.transformed(hidden[batch.chosen])
        logits = F.linear(transformed, self.embeddings.word.weight, self.masked_head.bias)
        return logits[:, : self.shape.vocabulary], self._next_sentence_logits(hidden, batch)

    def _next_sentence_logits(self, hidden: Tensor, batch: PretrainingBatch) -> Tensor:
        return self.next_head(torch.tanh(self.pooler(self.first_states(hidden, batch))))
