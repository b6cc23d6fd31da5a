"""The modules of ModernBERT: rotary positions, gates, local attention in most layers, norms before blocks, no biases.

n pieces, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pretraining.mesh.mesh import ALONE, Mesh
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout
from pretraining.model.encoder import Embeddings, Sight
from pretraining.model.fused import drop, embed, geglu, gelu, rotate
from pretraining.model.layout import Layout
from pretraining.model.modules import AddThenNorm, LayerDropouts, LookupTable, Product
from pretraining.model.piece_head import PieceHead
from pretraining.model.shape import Shape


def make_norm(shape: Shape) -> nn.LayerNorm:
    """Makes a layer norm without a bias."""
    return nn.LayerNorm(shape.hidden, shape.epsilon, bias=False)


class ModernEmbeddings(Embeddings):
    """The normalised embeddings of pieces."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.word = LookupTable(shape.padded_vocabulary, shape.hidden)
        self.norm = make_norm(shape)

    def forward(self, batch: Batch, dropout: Dropout) -> Tensor:
        return drop(self.norm(embed(self.word.weight, batch.pieces, mesh=self.mesh)), dropout)


class ModernLayer(nn.Module):
    """A layer: attention, then a gated feed-forward block, each with a norm before it; what goes on is the sum."""

    mesh: Mesh = ALONE

    def __init__(self, shape: Shape, sight: Sight, is_first: bool):
        super().__init__()
        self.heads, self.sight = shape.heads, sight
        self.first_norm = nn.Identity() if is_first else make_norm(shape)
        self.qkv = Product(shape.hidden, 3 * shape.hidden)
        self.output = Product(shape.hidden, shape.hidden)
        self.second_norm = AddThenNorm(shape.hidden, shape.epsilon, has_bias=False)
        self.inner = Product(shape.hidden, 2 * shape.intermediate)
        self.outer = Product(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts) -> Tensor:
        outer, total = self.compute_blocks(x, layout, dropouts)
        return total + drop(outer, dropouts.feed_forward)

    def compute_blocks(
        self, x: Tensor, layout: Layout, dropouts: LayerDropouts, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the product of the feed-forward block, and the sum that it is added to; of some rows if chosen."""
        assert layout.turns is not None
        heads = len(self.mesh.select_heads(self.heads))
        qkv = rotate(self.qkv(self.first_norm(x)), *layout.turns, heads)
        context = layout.attend(qkv, None, heads, dropouts.attention)
        if chosen is not None:
            context, x = context.index_select(0, chosen), x.index_select(0, chosen)
        total, normal = self.second_norm(self.output(context), None, x, dropouts.context)
        return self.outer(geglu(self.inner(normal))), total


class FinalModernLayer(ModernLayer):
    """The last layer, which may compute only some rows after attention, and the norm of its sum."""

    def __init__(self, shape: Shape, sight: Sight, is_first: bool):
        super().__init__(shape, sight, is_first)
        self.final_norm = AddThenNorm(shape.hidden, shape.epsilon, has_bias=False)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts, chosen: Tensor | None = None) -> Tensor:
        outer, total = self.compute_blocks(x, layout, dropouts, chosen)
        return self.final_norm(outer, None, total, dropouts.feed_forward)[1]


class ModernTransform(nn.Module):
    """Transforms hidden states before a decoder or a task's head."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.transform = Product(shape.hidden, shape.hidden)
        self.norm = make_norm(shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(gelu(self.transform(x), None))


class ModernPieceHead(PieceHead):
    """Transforms hidden states before the decoder, which has a bias."""

    def __init__(self, shape: Shape, at_once: int | None = None):
        super().__init__(shape, at_once)
        self.before = ModernTransform(shape)
        self.bias = nn.Parameter(torch.zeros(shape.padded_vocabulary))

    def transform_states(self, hidden: Tensor) -> Tensor:
        return self.before(hidden)
