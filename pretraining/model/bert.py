"""The modules of BERT: embeddings, layers and heads.

n pieces, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pretraining.mesh.mesh import ALONE, Mesh
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout
from pretraining.model.encoder import Embeddings
from pretraining.model.fused import drop, embed, gelu
from pretraining.model.layout import Layout
from pretraining.model.modules import AddAndNorm, FirstLinear, LayerDropouts, Linear, LookupTable
from pretraining.model.piece_head import PieceHead
from pretraining.model.shape import Shape


class BertEmbeddings(Embeddings):
    """The normalised sum of the embeddings of pieces, positions and segments."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.word = LookupTable(shape.padded_vocabulary, shape.hidden)
        self.position = LookupTable(shape.positions, shape.hidden)
        self.segment = LookupTable(shape.segments, shape.hidden)
        self.tells_segments = shape.segments > 1
        self.norm = nn.LayerNorm(shape.hidden, shape.epsilon)

    def forward(self, batch: Batch, dropout: Dropout) -> Tensor:
        segments = batch.segments if self.tells_segments else torch.zeros_like(batch.segments)
        small = (self.position.weight, batch.positions), (self.segment.weight, segments)
        total = embed(self.word.weight, batch.pieces, *small, mesh=self.mesh)
        return drop(self.norm(total), dropout)


class Attention(nn.Module):
    """Attention of every piece to the pieces of its sequence, of some heads where ranks share the model."""

    mesh: Mesh = ALONE

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.qkv = FirstLinear(shape.hidden, 3 * shape.hidden)
        self.output = Linear(shape.hidden, shape.hidden)
        self.norm = AddAndNorm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts, chosen: Tensor | None = None) -> Tensor:
        attends_sums = layout.attends_sums(x)
        qkv, residual = self.qkv(x, attends_sums is not None)
        heads = len(self.mesh.select_heads(self.heads))
        context = (attends_sums or layout.attend)(qkv, self.qkv.bias, heads, dropouts.attention)
        if chosen is not None:
            context, residual = context.index_select(0, chosen), residual.index_select(0, chosen)
        return self.norm(self.output(context), self.output.bias, residual, dropouts.context)


class FeedForward(nn.Module):
    """The feed-forward block: transforms every piece by itself, through a wider layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.inner = FirstLinear(shape.hidden, shape.intermediate)
        self.output = Linear(shape.intermediate, shape.hidden)
        self.norm = AddAndNorm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, dropout: Dropout) -> Tensor:
        inner, residual = self.inner(x)
        inner = gelu(inner, self.inner.bias)
        return self.norm(self.output(inner), self.output.bias, residual, dropout)


class Layer(nn.Module):
    """One layer of the encoder: attention, then feed-forward, which may compute only some rows."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts, chosen: Tensor | None = None) -> Tensor:
        return self.feed_forward(self.attention(x, layout, dropouts, chosen), dropouts.feed_forward)


class BertPieceHead(PieceHead):
    """Transforms hidden states before the decoder, which has a bias."""

    def __init__(self, shape: Shape, at_once: int | None = None):
        super().__init__(shape, at_once)
        self.transform = Linear(shape.hidden, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, shape.epsilon)
        self.bias = nn.Parameter(torch.zeros(shape.padded_vocabulary))

    def transform_states(self, hidden: Tensor) -> Tensor:
        return self.norm(gelu(self.transform(hidden), self.transform.bias))


class Pooler(nn.Linear):
    """Transforms the states of the pieces that stand for their sequences."""

    def __init__(self, hidden: int):
        super().__init__(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()
