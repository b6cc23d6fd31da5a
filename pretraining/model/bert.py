"""BERT as it is pre-trained: the encoder, and the heads that it learns from: two, or one where the data has no pairs.

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


class MaskedLosses(NamedTuple):
    """The loss and the right predictions of a model that predicts masked pieces alone, each summed over a batch."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    masked_correct: Tensor


class Losses(NamedTuple):
    """The losses and the right predictions of a model with both heads, each summed over a batch."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    next_sentence: Tensor
    """cross-entropy of whether B follows A"""
    masked_correct: Tensor
    next_sentence_correct: Tensor
    random_next: Tensor
    """sequences whose B does not follow A"""


class Logits(NamedTuple):
    """What the heads say before it becomes probabilities."""

    masked: Tensor
    """(m, vocabulary)"""
    next_sentence: Tensor | None
    """(s, 2); None where the model has no such head"""


def sums(shape: Shape) -> tuple[str, ...]:
    """Names what a model of this shape adds up over a batch."""
    return (Losses if shape.next_sentence else MaskedLosses)._fields


def pretraining_loss(losses: Losses | MaskedLosses, batches: PretrainingBatches) -> Tensor:
    """This micro-batch's part of the loss of the global batch: exact for any ranks and micro-batches."""
    masked = losses.masked / max(batches.predictions, 1)
    return masked if isinstance(losses, MaskedLosses) else masked + losses.next_sentence / batches.sequences


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
    """The encoder with the head of masked pieces and, where its shape says so, the one of next sentences."""

    def __init__(self, shape: Shape, recompute: bool = False):
        super().__init__(shape, recompute)
        if shape.next_sentence:
            self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.masked_head = MaskedHead(shape)
        if shape.next_sentence:
            self.next_head = nn.Linear(shape.hidden, 2)

    def forward(self, batch: PretrainingBatch) -> Losses | MaskedLosses:
        hidden = self.encode(batch)
        masked, masked_correct = self.masked_head(hidden[batch.chosen], self.embeddings.word.weight, batch.labels)
        if not self.shape.next_sentence:
            return MaskedLosses(masked, masked_correct)
        logits = self._next_sentence_logits(hidden, batch).float()
        next_sentence = F.cross_entropy(logits, batch.random_next, reduction="sum")
        next_correct = (logits.argmax(1) == batch.random_next).sum()
        return Losses(masked, next_sentence, masked_correct, next_correct, batch.random_next.sum())

    def heads(self, hidden: Tensor, batch: PretrainingBatch) -> Logits:
        """Computes the logits of the heads."""
        transformed = self.masked_head.transformed(hidden[batch.chosen])
        logits = F.linear(transformed, self.embeddings.word.weight, self.masked_head.bias)
        next_sentence = self._next_sentence_logits(hidden, batch) if self.shape.next_sentence else None
        return Logits(logits[:, : self.shape.vocabulary], next_sentence)

    def _next_sentence_logits(self, hidden: Tensor, batch: PretrainingBatch) -> Tensor:
        return self.next_head(torch.tanh(self.pooler(self.first_states(hidden, batch))))
