"""A fine-tuned model that only answers: with weights that are packed once, and of the last layer what the head sees.

Training needs neither: there weights change in every step, and all that is computed is kept for the backward pass. An
x86 processor multiplies fastest with weights in an order that oneDNN chooses; elsewhere, and where this
PyTorch lacks the operators, weights stay as they lie. Results are the same but for rounding.

n pieces, s sequences, H hidden.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.common.errors import UserError
from finetuning.model.heads import TaskBatch, TaskModel
from pretraining.model import cpu_kernels as kernels
from pretraining.model.attention import Layout, lay_out
from pretraining.model.encoder import AddAndNorm, Layer, Linear
from pretraining.model.fused import Dropout, gelu

KEEPS = Dropout(0.0, torch.empty(0, dtype=torch.int32))
"""Answers drop nothing."""
MOST_PADDED = 1 << 15
"""Pieces that the last layer compares at once, with their padding: one long text among thousands of short ones would
otherwise take gigabytes."""


class Product(Protocol):
    """A product with the weight of a linear layer."""

    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Leaves the bias to the operation that follows."""

    def with_gelu(self, x: Tensor) -> Tensor:
        """Adds the bias, and takes gelu of the sum."""


class PlainProduct(Product):
    """Multiplies with the weight as it lies, on any device."""

    def __init__(self, linear: Linear) -> None:
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def with_gelu(self, x: Tensor) -> Tensor:
        return gelu(self(x), self.bias)


class PackedProduct(Product):
    """Multiplies with the weight in the order that oneDNN chooses."""

    def __init__(self, linear: Linear) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return product

    def with_gelu(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "gelu", [], "none")
        return product


class QuantisedProduct(Product):
    """Multiplies with the weight in 8 bits, with a scale for each output and one for each row of the input.

    So the answer about a text does not depend on its neighbours in a batch.
    """

    ZERO = 128
    """The byte that stands for 0 on the left of a product; on the right it is 0."""

    def __init__(self, linear: Linear) -> None:
        weight = linear.weight.detach().float()
        self.scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        numbers = (weight / self.scales[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(numbers, None)
        self.bias = linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(len(x))
        kernels.call("quantise_rows", x.contiguous(), numbers, scales, *x.shape)
        ours, theirs = (numbers, 1.0, self.ZERO), (self.weight, self.scales, self.zeros)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(*ours, *theirs, None, 1.0, 0, x.dtype, "none", [], "")
        kernels.call("rescale_rows", product, scales, *product.shape)
        return product

    def with_gelu(self, x: Tensor) -> Tensor:
        return gelu(self(x), self.bias)


def check_int8(device: torch.device) -> None:
    """Raises UserError where products in 8 bits are not to be had."""
    cured = 'take "bf16", "fp32" or "auto"'
    if device.type != "cpu":
        raise UserError(f'dtype "int8": on a CPU alone; {cured}')
    if not torch.cpu._is_vnni_supported() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise UserError(f'dtype "int8": this processor, or this PyTorch, has no products of bytes; {cured}')
    if not kernels.usable(torch.zeros(1)):
        raise UserError(f'dtype "int8": needs a C++ compiler; install g++, or {cured}')


def can_pack(weight: Tensor) -> bool:
    """Whether a weight can be packed: on an x86 CPU, by this PyTorch, and in numbers that both are fast in."""
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())


def product(linear: Linear) -> Product:
    """The fastest product with the weight of a linear layer, in its numbers."""
    return PackedProduct(linear) if can_pack(linear.weight) else PlainProduct(linear)


Making = Callable[[Linear], Product]
"""Makes the product with the weight of a linear layer."""


class ServedLayer:
    """A layer of the encoder, for all pieces."""

    def __init__(self, layer: Layer, product: Making = product) -> None:
        attention, feed_forward = layer.attention, layer.feed_forward
        self.heads = attention.heads
        self.qkv, self.output = product(attention.qkv), product(attention.output)
        self.attention_norm, self.norm = attention.norm, feed_forward.norm
        self.inner, self.outer = product(feed_forward.inner), product(feed_forward.output)

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        """Computes the next hidden states, (n, H)."""
        return self.finish(layout.attend(self.qkv(x), self.qkv.bias, self.heads, KEEPS), x)

    def finish(self, context: Tensor, x: Tensor) -> Tensor:
        """Computes the rest of a layer after attention, for any rows."""
        x = _end(self.output, context, self.attention_norm, x)
        return _end(self.outer, self.inner.with_gelu(x), self.norm, x)


def _end(outer: Product, inner: Tensor, norm: AddAndNorm, x: Tensor) -> Tensor:
    """The end of a block: its last product, residual connection and layer norm."""
    end: Tensor = norm(outer(inner), outer.bias, x, KEEPS)
    return end


class LastLayer(ServedLayer):
    """The last layer, for the one piece of every sequence that stands for it, and sees all of it.

    A single query needs no keys: q · (W x) = (Wᵀ q) · x, so that the hidden states themselves are compared with one
    vector for each head. Nor does it need values: the mean of products is the product with the mean. What a bias of the
    keys would add is the same for all pieces, and softmax does not see it.
    """

    def __init__(self, layer: Layer, product: Making = product) -> None:
        super().__init__(layer, product)
        weight, bias = layer.attention.qkv.weight.detach(), layer.attention.qkv.bias.detach()
        self.query, self.key, self.value = weight.view(3, self.heads, -1, weight.shape[1])  # (heads, size, H) each
        self.query_bias, _, self.value_bias = bias.view(3, self.heads, 1, -1)  # (heads, 1, size) each

    def at(self, places: Tensor, x: Tensor, batch: TaskBatch) -> Tensor:
        """Computes the next hidden states of the pieces at these places, one of each sequence, (s, H)."""
        runs = list(parts(batch.lengths, MOST_PADDED))
        longest = [max(batch.lengths[begin:end]) for begin, end in runs]
        return torch.cat(
            [
                self._run(x[places[begin:end]], x, batch.starts[begin : end + 1], most)
                for (begin, end), most in zip(runs, longest, strict=True)
            ]
        )

    def _run(self, asking: Tensor, x: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Computes the next hidden states of the pieces that ask, one of each sequence, padded to the longest."""
        s, length = len(asking), -(-longest // 16) * 16
        at = torch.arange(length, dtype=torch.int32, device=x.device)
        inside = at < starts.diff()[:, None]
        rows = torch.where(inside, starts[:-1, None] + at, starts[:-1, None])  # at padding, any piece
        states = x.index_select(0, rows.view(-1)).view(s, length, -1)
        query = torch.baddbmm(self.query_bias, asking.expand(self.heads, s, -1), self.query.transpose(1, 2))
        sought = torch.bmm(query, self.key).transpose(0, 1)  # (s, heads, H)
        scores = torch.bmm(sought, states.transpose(1, 2)).float() * self.query.shape[1] ** -0.5
        shares = scores.masked_fill(~inside[:, None], -torch.inf).softmax(2).to(x.dtype)
        mean = torch.bmm(shares, states).transpose(0, 1)  # (heads, s, H)
        context = torch.baddbmm(self.value_bias, mean, self.value.transpose(1, 2))  # (heads, s, size)
        return self.finish(context.transpose(0, 1).reshape(s, -1), asking)


def parts(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cuts sequences into runs that hold at most so many pieces, each padded to the longest of its run."""
    begin = longest = 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > begin and (number + 1 - begin) * longest > most:
            yield begin, number
            begin, longest = number, length
    yield begin, len(lengths)


class ServedModel:
    """A fine-tuned model that answers and does not learn. It takes the layers of the one that it is made of."""

    def __init__(self, model: TaskModel, int8: bool = False) -> None:
        """`int8`: layers multiply in 8 bits, which `check_int8` has allowed; all else stays in the model's numbers."""
        making = QuantisedProduct if int8 else product
        self.model = model.eval().requires_grad_(False)
        layers = deque(cast(Layer, layer) for layer in model.layers)
        model.layers = nn.ModuleList()  # packed weights take their place, one after another: memory is for one of both
        self.layers: list[ServedLayer] = []
        while len(layers) > 1:
            self.layers.append(ServedLayer(layers.popleft(), making))
        self.last = (LastLayer if model.sees_one else ServedLayer)(layers.popleft(), making)

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head, in fp32."""
        model = self.model
        x = model.embeddings(model.laid(batch), KEEPS)
        layout = lay_out(batch.starts, batch.lengths, x, model.shape.heads, one_way=model.shape.one_way)
        n, spare = len(x), layout.spare_rows(x, packed=isinstance(self.last.outer, PackedProduct))
        x = F.pad(x, (0, 0, 0, spare)) if spare else x
        for layer in self.layers:
            x = layer(x, layout)
        if isinstance(self.last, LastLayer):
            # in the order of the layers, in which one way is always towards the end
            places = (batch.starts[1:] - 1 if model.shape.one_way else batch.starts[:-1]).long()
            return model.say(self.last.at(places, x, batch), batch)
        return model.say(model.seen(model.in_order(self.last(x, layout)[:n], batch), batch), batch)
