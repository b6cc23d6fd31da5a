"""BERT: the encoder and the two heads of its pre-training, on sequences laid one after another without padding.

n pieces, s sequences, m predicted positions, H hidden. Linear layers, norms and losses see the n pieces, or the m or s
of them that they are about, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretraining.model import fused as operations
from pretraining.model.attention import Layout, attend
from pretraining.model.batch import Batch
from pretraining.model.fused import Dropout, add_and_norm, drop, gelu, masked_loss, row_keys
from pretraining.model.shape import Shape

INITIAL_RANGE = 0.02
SITES = 4
"""dropout sites of a layer, at most"""


class Losses(NamedTuple):
    """Sums over a batch."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    next_sentence: Tensor
    """cross-entropy of whether B follows A"""
    masked_correct: Tensor
    next_sentence_correct: Tensor


class Linear(nn.Module):
    """A product with a weight. The bias is left to the operation that follows, which adds it in passing."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class AddAndNorm(nn.Module):
    """The end of a block: dropout, residual connection and layer norm."""

    def __init__(self, hidden: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor, bias: Tensor, residual: Tensor, dropout: Dropout) -> Tensor:
        return add_and_norm(x, bias, residual, self.weight, self.bias, self.epsilon, dropout)


class Table(nn.Module):
    """Rows to look up."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Embeddings(nn.Module):
    """The sum of what a piece, its position and its segment are, normalised."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.word = Table(shape.padded_vocabulary, shape.hidden)
        self.position = Table(shape.positions, shape.hidden)
        self.segment = Table(shape.segments, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, shape.epsilon)

    def forward(self, batch: Batch, dropout: Dropout) -> Tensor:
        ids = (batch.pieces, batch.positions, batch.segments)
        total = operations.embed(self.word.weight, self.position.weight, self.segment.weight, ids)
        return drop(self.norm(total), dropout)


class Attention(nn.Module):
    """Every piece looks at its sequence."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.qkv = Linear(shape.hidden, 3 * shape.hidden)
        self.output = Linear(shape.hidden, shape.hidden)
        self.norm = AddAndNorm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, layout: Layout, shares_dropout: Dropout, dropout: Dropout) -> Tensor:
        context = attend(self.qkv(x), self.qkv.bias, layout, self.heads, shares_dropout)
        return self.norm(self.output(context), self.output.bias, x, dropout)


class FeedForward(nn.Module):
    """Every piece by itself."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.inner = Linear(shape.hidden, shape.intermediate)
        self.output = Linear(shape.intermediate, shape.hidden)
        self.norm = AddAndNorm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, dropout: Dropout) -> Tensor:
        inner = gelu(self.inner(x), self.inner.bias)
        return self.norm(self.output(inner), self.output.bias, x, dropout)


class Layer(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, shape: Shape, index: int):
        super().__init__()
        self.sites = SITES * (index + 1)
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, layout: Layout, shares_dropout: Dropout, dropout: Dropout) -> Tensor:
        x = self.attention(x, layout, shares_dropout.at(self.sites), dropout.at(self.sites + 1))
        return self.feed_forward(x, dropout.at(self.sites + 2))


class MaskedHead(nn.Module):
    """What stood at a masked position; the decoder's weight is that of the word embeddings."""

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


class Bert(nn.Module):
    """The encoder with both heads."""

    def __init__(self, shape: Shape, recompute: bool = False):
        super().__init__()
        self.shape = shape
        self.recompute = recompute
        """whether the backward pass computes each layer once more instead of keeping what it needs"""
        self.draw = 0
        """names the masks of dropout: another one for each step"""
        self.embeddings = Embeddings(shape)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.masked_head = MaskedHead(shape)
        self.next_head = nn.Linear(shape.hidden, 2)

    def initialize(self, seed: int) -> Bert:
        """Fresh weights: a normal distribution cut at two deviations; the same for a seed, however many ranks."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                cut = 2 * INITIAL_RANGE
                nn.init.trunc_normal_(parameter, std=INITIAL_RANGE, a=-cut, b=cut, generator=generator)
        with torch.no_grad():
            self.embeddings.word.weight[self.shape.vocabulary :] = 0
        return self

    @staticmethod
    def fused(name: str) -> int:
        """How many of the paper's parameters lie one after another in this one: query, key and value in one."""
        return 3 if ".qkv." in name else 1

    def encode(self, batch: Batch) -> Tensor:
        """The last hidden states, (n, H)."""
        layout = Layout(batch.starts, batch.lengths)
        dropout, shares_dropout = self._dropouts(batch)
        x = self.embeddings(batch, dropout)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, layout, shares_dropout, dropout, use_reentrant=False)
            else:
                x = layer(x, layout, shares_dropout, dropout)
        return x

    def _dropouts(self, batch: Batch) -> tuple[Dropout, Dropout]:
        """Of hidden states, and of the shares of attention."""
        hidden, shares = (self.shape.dropout, self.shape.attention_dropout) if self.training else (0.0, 0.0)
        keys = torch.empty(0, dtype=torch.int32)
        if (hidden or shares) and batch.pieces.device.type == "cpu":
            keys = row_keys(self.draw, batch.examples, batch.positions.numpy(), np.array(batch.lengths))
        return Dropout(hidden, keys), Dropout(shares, keys)

    def forward(self, batch: Batch) -> Losses:
        hidden = self.encode(batch)
        masked, masked_correct = self.masked_head(hidden[batch.chosen], self.embeddings.word.weight, batch.labels)
        next_logits = self._next_logits(hidden, batch).float()
        next_loss = F.cross_entropy(next_logits, batch.random_next, reduction="sum")
        next_correct = (next_logits.argmax(1) == batch.random_next).sum()
        return Losses(masked, next_loss, masked_correct, next_correct)

    def heads(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits of both heads: (m, vocabulary) and (s, 2)."""
        transformed = self.masked_head.transformed(hidden[batch.chosen])
        logits = F.linear(transformed, self.embeddings.word.weight, self.masked_head.bias)
        return logits[:, : self.shape.vocabulary], self._next_logits(hidden, batch)

    def _next_logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        first = hidden[batch.starts[:-1].long()]
        return self.next_head(torch.tanh(self.pooler(first)))
