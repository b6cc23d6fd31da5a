"""The modules of GPT-2: embeddings without a norm, and layers that begin with one.

n pieces, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from pretraining.mesh.mesh import ALONE, Mesh
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout
from pretraining.model.encoder import Embeddings
from pretraining.model.fused import drop, embed, gelu
from pretraining.model.layout import Layout
from pretraining.model.modules import AddThenNorm, LayerDropouts, Linear, LookupTable
from pretraining.model.shape import Shape


class GptEmbeddings(Embeddings):
    """The sum of the embeddings of pieces and positions."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.word = LookupTable(shape.padded_vocabulary, shape.hidden)
        self.position = LookupTable(shape.positions, shape.hidden)

    def forward(self, batch: Batch, dropout: Dropout) -> Tensor:
        total = embed(self.word.weight, batch.pieces, (self.position.weight, batch.positions), mesh=self.mesh)
        return drop(total, dropout)


class GptLayer(nn.Module):
    """A layer: attention, then feed-forward, each with a norm before it; what goes on is the sum."""

    mesh: Mesh = ALONE

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.first_norm = nn.LayerNorm(shape.hidden, shape.epsilon)
        self.qkv = Linear(shape.hidden, 3 * shape.hidden)
        self.output = Linear(shape.hidden, shape.hidden)
        self.second_norm = AddThenNorm(shape.hidden, shape.epsilon)
        self.inner = Linear(shape.hidden, shape.intermediate)
        self.outer = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts) -> Tensor:
        outer, total = self.compute_blocks(x, layout, dropouts)
        return total + drop(outer + self.outer.bias, dropouts.feed_forward)

    def compute_blocks(
        self, x: Tensor, layout: Layout, dropouts: LayerDropouts, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the product of the feed-forward block, and the sum that it is added to; of some rows if chosen."""
        heads = len(self.mesh.select_heads(self.heads))
        context = layout.attend(self.qkv(self.first_norm(x)), self.qkv.bias, heads, dropouts.attention)
        if chosen is not None:
            context, x = context.index_select(0, chosen), x.index_select(0, chosen)
        total, normal = self.second_norm(self.output(context), self.output.bias, x, dropouts.context)
        return self.outer(gelu(self.inner(normal), self.inner.bias, True)), total


class FinalGptLayer(GptLayer):
    """The last layer, which may compute only some rows after attention, and the norm of its sum."""

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.final_norm = AddThenNorm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts, chosen: Tensor | None = None) -> Tensor:
        outer, total = self.compute_blocks(x, layout, dropouts, chosen)
        return self.final_norm(outer, self.outer.bias, total, dropouts.feed_forward)[1]
