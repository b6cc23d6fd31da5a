"""The layers of BERT for inference: weights are packed once, and the last layer computes only the rows that the head
needs.

On a CPU our kernels compute all layers in one call, with weights in an order of their own (`one_call.py`). For sizes
and types that they do not support, layers run one after another: on x86, products are fastest with weights in an order
that oneDNN chooses; elsewhere weights stay as they are. Results are those
of the encoder but for rounding.

n pieces, s sequences, H hidden.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.answering.one_call import OneCall, find_way, quantise
from pretraining.answering.serving import ServedLayers
from pretraining.devices import cpu_has_bf16
from pretraining.model import cpu_kernels as kernels
from pretraining.model.attention import lay_out
from pretraining.model.batch import Batch
from pretraining.model.bert import Layer
from pretraining.model.dropout import KEEPS
from pretraining.model.encoder import Encoder
from pretraining.model.fused import gelu
from pretraining.model.layout import Layout
from pretraining.model.modules import AddAndNorm, Linear
from pretraining.model.shape import Shape

MOST_PADDED = 1 << 15
"""The most pieces, with padding, that the last layer compares at once: one long text among thousands of short ones
would take gigabytes."""


class ServedProduct:
    """Multiplies with the weight of a linear layer as it lies, on any device."""

    def __init__(self, linear: Linear) -> None:
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies; the operation that follows adds the bias."""
        return F.linear(x, self.weight)

    def with_gelu(self, x: Tensor) -> Tensor:
        """Multiplies, and computes gelu of the product with its bias."""
        return gelu(self(x), self.bias)


class PackedProduct(ServedProduct):
    """Multiplies with the weight in the order that oneDNN chooses."""

    def __init__(self, linear: Linear) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], ""))

    def with_gelu(self, x: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu", [], "none"))


class QuantisedProduct(ServedProduct):
    """Multiplies with the weight in 8 bits, with a scale for each output and one for each row of the input.

    So the result for a text does not depend on the other texts of its batch.
    """

    ZERO = 128
    """The byte that stands for 0 in the inputs; in weights it is 0."""

    def __init__(self, linear: Linear) -> None:
        numbers, self.scales = quantise(linear.weight)
        self.zeros = torch.zeros(len(numbers), dtype=torch.int64)
        self.weight = torch.ops.onednn.qlinear_prepack(numbers, None)
        self.bias = linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(len(x))
        kernels.call("quantise_rows", x.contiguous(), numbers, scales, *x.shape)
        ours, theirs = (numbers, 1.0, self.ZERO), (self.weight, self.scales, self.zeros)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(*ours, *theirs, None, 1.0, 0, x.dtype, "none", [], "")
        kernels.call("rescale_rows", product, scales, *product.shape)
        return product


def can_pack(weight: Tensor) -> bool:
    """Whether this PyTorch can pack a weight, on an x86 CPU and in a type that is fast there."""
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64") or not torch._C._has_mkldnn:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and cpu_has_bf16())


def make_product(linear: Linear) -> ServedProduct:
    """Makes the fastest product with the weight of a linear layer, in its own type."""
    return PackedProduct(linear) if can_pack(linear.weight) else ServedProduct(linear)


MakeProduct = Callable[[Linear], ServedProduct]
"""Makes the product with the weight of a linear layer."""


class ServedLayer:
    """A layer of the encoder, for all pieces."""

    def __init__(self, layer: Layer, make: MakeProduct = make_product) -> None:
        attention, feed_forward = layer.attention, layer.feed_forward
        self.heads = attention.heads
        self.qkv, self.output = make(attention.qkv), make(attention.output)
        self.attention_norm, self.norm = attention.norm, feed_forward.norm
        self.inner, self.outer = make(feed_forward.inner), make(feed_forward.output)

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        """Computes the next hidden states, (n, H)."""
        return self.finish(layout.attend(self.qkv(x), self.qkv.bias, self.heads, KEEPS), x)

    def finish(self, context: Tensor, x: Tensor) -> Tensor:
        """Computes a layer after its attention, for any rows."""
        x = _finish_block(self.output, context, self.attention_norm, x)
        return _finish_block(self.outer, self.inner.with_gelu(x), self.norm, x)


def _finish_block(outer: ServedProduct, inner: Tensor, norm: AddAndNorm, x: Tensor) -> Tensor:
    """Computes the end of a block: its last product, residual connection and layer norm."""
    return cast(Tensor, norm(outer(inner), outer.bias, x, KEEPS))


class LastLayer(ServedLayer):
    """The last layer for one piece of every sequence.

    A single query needs no keys: q · (W x) = (Wᵀ q) · x, so that the hidden states themselves are compared with one
    vector for each head. Nor does it need values: the mean of products is the product with the mean. The bias of the
    keys adds the same to all scores, which softmax ignores.
    """

    def __init__(self, layer: Layer, make: MakeProduct = make_product) -> None:
        super().__init__(layer, make)
        weight, bias = layer.attention.qkv.weight.detach(), layer.attention.qkv.bias.detach()
        self.query, self.key, self.value = weight.view(3, self.heads, -1, weight.shape[1])  # (heads, size, H) each
        self.query_bias, _, self.value_bias = bias.view(3, self.heads, 1, -1)  # (heads, 1, size) each

    def compute_one(self, x: Tensor, batch: Batch, places: Tensor, seen: Tensor) -> Tensor:
        """Computes the next hidden states of the pieces at these places among all, one of every sequence: (s, H).

        `seen` is (s,): the number of pieces of its sequence, from the first on, that each of them sees.
        """
        runs, starts, lengths = split_runs(batch.lengths, MOST_PADDED), batch.starts, batch.lengths
        found = [self._run(x, starts[a:b], lengths[a:b], places[a:b], seen[a:b]) for a, b in runs]
        return torch.cat(found)

    def _run(self, x: Tensor, starts: Tensor, lengths: Sequence[int], places: Tensor, seen: Tensor) -> Tensor:
        """Computes the next hidden states of these pieces of some sequences, padded to the longest."""
        s, length = len(lengths), -(-max(lengths) // 16) * 16
        at = torch.arange(length, dtype=torch.int32, device=x.device)
        inside = at < seen[:, None]
        rows = torch.where(inside, starts[:, None] + at, starts[:, None])  # any piece where none is seen
        chosen, states = x[places], x.index_select(0, rows.view(-1)).view(s, length, -1)
        query = torch.baddbmm(self.query_bias, chosen.expand(self.heads, s, -1), self.query.transpose(1, 2))
        sought = torch.bmm(query, self.key).transpose(0, 1)  # (s, heads, H)
        scores = torch.bmm(sought, states.transpose(1, 2)).float() * self.query.shape[1] ** -0.5
        shares = scores.masked_fill(~inside[:, None], -torch.inf).softmax(2).to(x.dtype)
        mean = torch.bmm(shares, states).transpose(0, 1)  # (heads, s, H)
        context = torch.baddbmm(self.value_bias, mean, self.value.transpose(1, 2))  # (heads, s, size)
        return self.finish(context.transpose(0, 1).reshape(s, -1), chosen)


def split_runs(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Splits sequences into runs of at most `most` pieces, each padded to the longest of its run."""
    begin = longest = 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > begin and (number + 1 - begin) * longest > most:
            yield begin, number
            begin, longest = number, length
    yield begin, len(lengths)


class LayerByLayer:
    """Layers that run one after another, on any device and in any numbers; `OneCall` has the same methods."""

    def __init__(self, shape: Shape, layers: deque[Layer], sees_one: bool, make: MakeProduct) -> None:
        """Empties `layers` one by one: memory never holds the weights of all layers beside their packed copies."""
        self.shape = shape
        self.layers: list[ServedLayer] = []
        while len(layers) > 1:
            self.layers.append(ServedLayer(layers.popleft(), make))
        self.last = (LastLayer if sees_one else ServedLayer)(layers.popleft(), make)

    def compute_all(self, x: Tensor, batch: Batch) -> Tensor:
        """Computes the last hidden states of all pieces, (n, H), from the output of the embeddings."""
        n = len(x)
        return self.last(*self._run_lower_layers(x, batch))[:n]

    def compute_one(self, x: Tensor, batch: Batch, places: Tensor) -> Tensor:
        """Computes the last hidden states at these places among all pieces, one of every sequence: (s, H)."""
        assert isinstance(self.last, LastLayer)
        seen = places + 1 - batch.starts[:-1] if self.shape.one_way else batch.starts.diff()
        return self.last.compute_one(self._run_lower_layers(x, batch)[0], batch, places, seen)

    def _run_lower_layers(self, x: Tensor, batch: Batch) -> tuple[Tensor, Layout]:
        """Computes the input of the last layer, with the rows of zeros that the layout needs."""
        layout = lay_out(batch.starts, batch.lengths, x, self.shape.heads, one_way=self.shape.one_way)
        spare = layout.spare_rows(x, packed=isinstance(self.last.outer, PackedProduct))
        x = F.pad(x, (0, 0, 0, spare)) if spare else x
        for layer in self.layers:
            x = layer(x, layout)
        return x, layout


def serve_layers(encoder: Encoder, sees_one: bool, in_bytes: bool) -> ServedLayers:
    """Packs the layers of an encoder, and takes them out of it; the arguments are those of `ServedEncoder`."""
    layers = deque(cast(Layer, layer) for layer in encoder.layers)
    encoder.layers = nn.ModuleList()
    way, make = find_way(encoder, in_bytes), QuantisedProduct if in_bytes else make_product
    if way is None:
        return LayerByLayer(encoder.shape, layers, sees_one, make)
    return OneCall(encoder.shape, layers, way)
