"""BERT's encoder, on sequences laid one after another without padding.

n pieces, s sequences, H hidden. Linear layers and norms see the n real pieces, in bf16 on a CPU some rows of zeros too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_prep.common.errors import UserError
from pretraining.model import gpu_operations as gpu
from pretraining.model.attention import Layout, Padded, lay_out
from pretraining.model.batch import Batch
from pretraining.model.fused import Dropout, add_and_norm, drop, embed, gelu, row_keys
from pretraining.model.products import product, product_and_past
from pretraining.model.shape import Shape

AnyEncoder = TypeVar("AnyEncoder", bound="Encoder")
INITIAL_RANGE = 0.02
SITES = 4
"""How many places of a layer drop something, at most: their masks must differ."""


class LayerDropouts(NamedTuple):
    """What a layer drops, made outside of it: torch.compile would translate a layer anew for every number in it."""

    attention: Dropout
    """of the probabilities of attention"""
    context: Dropout
    """of what attention gives"""
    feed_forward: Dropout
    """of what the feed-forward block gives"""


class Linear(nn.Module):
    """A product with a weight. The bias is left to the operation that follows, which adds it in passing."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


class FirstLinear(Linear):
    """The first product of a block, whose input also goes past the block, to the residual connection."""

    def forward(self, x: Tensor, add_bias: bool = False) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The product, and what goes past it; `add_bias` gives the product its bias, and the bias no gradient."""
        bias = self.bias.detach() if add_bias else None
        return product_and_past(x, self.weight, bias)


class AddAndNorm(nn.Module):
    """The end of a block: dropout, residual connection and layer norm."""

    def __init__(self, hidden: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor, bias: Tensor, residual: Tensor, dropout: Dropout) -> Tensor:
        return add_and_norm(x, bias, residual, self.weight, self.bias, self.epsilon, dropout)


class LookupTable(nn.Module):
    """A weight whose rows are looked up by their numbers."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Embeddings(nn.Module):
    """The sum of what a piece, its position and its segment are, normalised."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.word = LookupTable(shape.padded_vocabulary, shape.hidden)
        self.position = LookupTable(shape.positions, shape.hidden)
        self.segment = LookupTable(shape.segments, shape.hidden)
        self.tells_segments = shape.segments > 1
        self.norm = nn.LayerNorm(shape.hidden, shape.epsilon)

    def forward(self, batch: Batch, dropout: Dropout) -> Tensor:
        segments = batch.segments if self.tells_segments else torch.zeros_like(batch.segments)
        ids = (batch.pieces, batch.positions, segments)
        total = embed(self.word.weight, self.position.weight, self.segment.weight, ids)
        return drop(self.norm(total), dropout)


class Attention(nn.Module):
    """Mixes every piece with the other pieces of its sequence."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.qkv = FirstLinear(shape.hidden, 3 * shape.hidden)
        self.output = Linear(shape.hidden, shape.hidden)
        self.norm = AddAndNorm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts, asked: Tensor | None = None) -> Tensor:
        attends_sums = layout.attends_sums(x)
        qkv, past = self.qkv(x, attends_sums is not None)
        context = (attends_sums or layout.attend)(qkv, self.qkv.bias, self.heads, dropouts.attention)
        if asked is not None:
            context, past = context.index_select(0, asked), past.index_select(0, asked)
        return self.norm(self.output(context), self.output.bias, past, dropouts.context)


class FeedForward(nn.Module):
    """Transforms every piece by itself, through a wider layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.inner = FirstLinear(shape.hidden, shape.intermediate)
        self.output = Linear(shape.intermediate, shape.hidden)
        self.norm = AddAndNorm(shape.hidden, shape.epsilon)

    def forward(self, x: Tensor, dropout: Dropout) -> Tensor:
        inner, past = self.inner(x)
        inner = gelu(inner, self.inner.bias)
        return self.norm(self.output(inner), self.output.bias, past, dropout)


class Layer(nn.Module):
    """One layer of the encoder: attention, then feed-forward."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts) -> Tensor:
        return self.feed_forward(self.attention(x, layout, dropouts), dropouts.feed_forward)


class FinalLayer(Layer):
    """The last layer, which goes on after attention with those rows alone that are asked for. torch.compile counts its
    translations apart from those of other layers, since its `forward` is code of its own."""

    def forward(self, x: Tensor, layout: Layout, dropouts: LayerDropouts, asked: Tensor | None = None) -> Tensor:
        return self.feed_forward(self.attention(x, layout, dropouts, asked), dropouts.feed_forward)


def require_own_masks(hidden: Dropout, attention: Dropout, layout: Layout) -> None:
    """Refuses what torch.compile would draw masks for: those repeat in torch 2.13 (pytorch issue 198333)."""
    if (hidden.probability and hidden.columns is None) or (attention.probability and isinstance(layout, Padded)):
        raise UserError(
            "compute.compile = true: not with dropout on this GPU, which lacks the flash kernels or a kernel of ours;\n"
            "take compute.compile = false, or model.dropout = 0 and model.attention_dropout = 0"
        )


class Trainable(nn.Module):
    """What an engine can train: a model of these sizes, whose dropout follows a seed."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.dropout_seed = 0
        """Decides what dropout drops; every step of training sets another one."""

    def compile_layers(self) -> None:
        """Lets torch.compile translate what it can; nothing, unless a model says what."""

    @staticmethod
    def fused_parts(name: str) -> int:  # noqa: ARG004
        """How many parameters of the paper lie one after another in the parameter of this name."""
        return 1


class Encoder(Trainable):
    """BERT's encoder without heads: embeddings and layers. A model with heads derives from it."""

    def __init__(self, shape: Shape, recompute: bool = False):
        """`recompute`: the backward pass computes each layer once more instead of keeping what it needs."""
        super().__init__(shape)
        self.recompute = recompute
        self.embeddings = Embeddings(shape)
        self.layers = nn.ModuleList([*(Layer(shape) for _ in range(shape.layers - 1)), FinalLayer(shape)])
        self.compiled = False

    def initialize(self: AnyEncoder, seed: int) -> AnyEncoder:
        """Draws fresh weights from a normal distribution cut at two deviations: the same for a seed on any ranks. A GPU
        draws others than a CPU."""
        generator = torch.Generator(next(self.parameters()).device).manual_seed(seed)
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

    def compile_layers(self) -> None:
        """Lets torch.compile translate the layers when they first run, or raise an error.

        All layers but the last share a translation, and nearly all batches do: torch.compile makes others for
        evaluation, for one sequence alone and for one piece alone, six at most (more than eight would be an error)."""
        self.compiled = True
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=True)

    @staticmethod
    def fused_parts(name: str) -> int:
        """How many parameters of the paper lie one after another in the parameter of this name: three in `qkv`."""
        return 3 if ".qkv." in name else 1

    def encode(self, batch: Batch, asked: Tensor | None = None) -> Tensor:
        """Computes the last hidden states, (n, H), or (k, H): those of the k pieces at the places that are asked for.

        That saves most of the last layer: behind its attention nothing else is computed.
        """
        if asked is None:
            return self.in_order(deque(self._states(self.laid(batch)), maxlen=1)[0], batch)
        places = batch.turns()[asked] if self.shape.sees == "after" else asked
        return deque(self._states(self.laid(batch), places), maxlen=1)[0]

    def states(self, batch: Batch) -> Iterator[Tensor]:
        """Computes the hidden states, (n, H), that the embeddings give, then those of each layer."""
        return (self.in_order(x, batch) for x in self._states(self.laid(batch)))

    def laid(self, batch: Batch) -> Batch:
        """The batch as the layers go through it: sequences are turned round where a piece sees those after it, so that
        attention knows one direction alone."""
        return batch.turned() if self.shape.sees == "after" else batch

    def in_order(self, x: Tensor, batch: Batch) -> Tensor:
        """Hidden states of the layers, in the order of the text."""
        return x.index_select(0, batch.turns()) if self.shape.sees == "after" else x

    def _states(self, batch: Batch, asked: Tensor | None = None) -> Iterator[Tensor]:
        """Computes the hidden states of a batch as the layers go through it; of the last, those that are asked for."""
        hidden, attention = self.dropouts(batch)
        x = self.embeddings(batch, hidden)
        yield x
        if self.compiled:
            hidden = hidden.for_compiled(SITES * (len(self.layers) + 1), self.shape.hidden)
        layout = lay_out(batch.starts, batch.lengths, x, self.shape.heads, self.compiled, self.shape.one_way)
        if self.compiled and x.is_cuda:
            require_own_masks(hidden, attention, layout)
        n, spare = len(x), layout.spare_rows(x)
        if spare:
            x = F.pad(x, (0, 0, 0, spare))
            hidden, attention = hidden.with_spare(spare), attention.with_spare(spare)
        for number in range(1, len(self.layers)):
            x = self._through(number, x, layout, hidden, attention)
            yield x[:n] if spare else x
        if asked is None:
            x = self._through(len(self.layers), x, layout, hidden, attention)
        else:
            n, spare = len(asked), layout.spare_rows(x[: len(asked)])
            asked = F.pad(asked, (0, spare))  # by the first row: nobody reads what comes of it there
            hidden = hidden.for_rows(asked)
            x = self._through(len(self.layers), x, layout, hidden, attention, asked)
        yield x[:n] if spare else x

    def _through(
        self, number: int, x: Tensor, layout: Layout, hidden: Dropout, attention: Dropout, *asked: Tensor
    ) -> Tensor:
        """Passes hidden states through a layer, counted from 1; the last may be asked for some of its rows alone."""
        layer, site = self.layers[number - 1], SITES * number
        dropouts = LayerDropouts(attention.for_site(site), hidden.for_site(site + 1), hidden.for_site(site + 2))
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, x, layout, dropouts, *asked, use_reentrant=False)
        return layer(x, layout, dropouts, *asked)

    def sequence_states(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Picks the hidden states that stand for their sequences, (s, H)."""
        return hidden[self.sequence_places(batch)]

    def sequence_places(self, batch: Batch) -> Tensor:
        """(s,) int64: where the pieces lie that stand for their sequences, since they see all of it: [CLS], or the last
        piece where none sees those after it."""
        return (batch.starts[1:] - 1 if self.shape.sees == "before" else batch.starts[:-1]).long()

    def dropouts(self, batch: Batch) -> tuple[Dropout, Dropout]:
        """What is dropped of hidden states, and what of the probabilities of attention.

        Of hidden states our kernels and compiled layers drop by the keys of rows, on a CPU and on a GPU: neither the
        rank nor its device decides. The flash kernels of a GPU draw from PyTorch's generator, which is another one for
        each rank.
        """
        shape = self.shape
        hidden, attention = (shape.dropout, shape.attention_dropout) if self.training else (0.0, 0.0)
        keys = torch.empty(0, dtype=torch.int32)
        if (hidden or attention) and batch.pieces.device.type == "cpu":
            keys = row_keys(self.dropout_seed, batch.examples, batch.positions.numpy(), np.array(batch.lengths))
        elif hidden and gpu.usable("row_keys", batch.positions):
            longest = max(batch.lengths)
            keys = gpu.row_keys(self.dropout_seed, batch.examples, batch.positions, batch.starts, longest)
        return Dropout(hidden, keys), Dropout(attention, keys)
