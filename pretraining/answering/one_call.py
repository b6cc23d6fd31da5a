"""Computes all layers of an encoder in one call of our kernels, for inference on a CPU.

Products are in fp32, bf16 or 8 bits, all else is in fp32. A small model computes a short text in less time than Python
takes to call its operations one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.batch import Batch
from pretraining.model.bert import Layer
from pretraining.model.encoder import Encoder
from pretraining.model.modules import AddAndNorm, Linear
from pretraining.model.shape import Shape

PANEL = 32
"""The columns of a weight that the kernels multiply at once; on some processors half as many."""
ROWS = 512
"""The rows that a layer computes at once."""


class Way(NamedTuple):
    """The number format of products: its kernel, and how weights are packed for it."""

    kernel: str
    pack: Callable[[Linear], tuple[Tensor, ...]]
    """makes the tensors of a product, in the order in which the kernel reads them"""


def _pack_panels(kernel: str, linear: Linear) -> tuple[Tensor, ...]:
    """Packs a weight in its own type, in the order that the kernel needs."""
    weight = linear.weight.detach().contiguous()
    panels = torch.empty_like(weight)
    kernels.call(kernel, weight, panels, *weight.shape)
    return panels, _copy_to_fp32(linear.bias)


def _pack_bytes(linear: Linear) -> tuple[Tensor, ...]:
    numbers, scales = quantise(linear.weight)
    panels, zeros = torch.empty_like(numbers), torch.empty(len(numbers), dtype=torch.int32)
    kernels.call("pack_bytes", scales, numbers, panels, zeros, *numbers.shape)
    return panels, _copy_to_fp32(linear.bias), scales, zeros


def _copy_to_fp32(weight: Tensor) -> Tensor:
    """Copies a weight to fp32."""
    return weight.detach().to(torch.float32, copy=True).contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight to 8 bits: int8 numbers, (outputs, inputs), and the fp32 scale of each output, (outputs,). The
    largest number of an output is 127 times its scale."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round().to(torch.int8), scales


FLOATS = Way("answer", partial(_pack_panels, "pack_floats"))
HALVES = Way("answer_in_halves", partial(_pack_panels, "pack_halves"))
BYTES = Way("answer_in_bytes", _pack_bytes)


def can_multiply(way: Way) -> bool:
    """Whether the kernels have the fastest products of this format here; on a processor with tiles, oneDNN has them."""
    return kernels.has_kernel(way.kernel) and (way is FLOATS or not kernels.has_tiles())


def find_way(encoder: Encoder, in_bytes: bool) -> Way | None:
    """Finds the format in which the kernels compute an encoder; None where they do not support its type or sizes."""
    weight = encoder.embeddings.word.weight
    way = BYTES if in_bytes else HALVES if weight.dtype == torch.bfloat16 else FLOATS
    return way if kernels.usable(weight) and fits_panels(encoder.shape) and can_multiply(way) else None


def fits_panels(shape: Shape) -> bool:
    """Whether all weights of a layer are whole panels, and the heads too."""
    return not any(size % PANEL for size in (shape.hidden // shape.heads, shape.intermediate))


class OneCall:
    """The layers of an encoder, with their weights in panels."""

    def __init__(self, shape: Shape, layers: deque[Layer], way: Way) -> None:
        """Empties `layers` one by one: memory never holds the weights of all layers beside their packed copies."""
        self.shape, self.depth, self.kernel = shape, len(layers), way.kernel
        self.weights: list[Tensor] = []
        while layers:
            self.weights += _pack_layer(layers.popleft(), way.pack)
        self.find_weights()

    def find_weights(self) -> None:
        """Stores the addresses of the weights for the kernels."""
        self.pointers = torch.tensor([weight.data_ptr() for weight in self.weights])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, whose weights have other addresses."""
        vars(self).update(state)
        self.find_weights()

    def compute_all(self, x: Tensor, batch: Batch) -> Tensor:
        """Computes the last hidden states of all pieces, (n, H); overwrites x if it is fp32."""
        states = x.float()
        self._answer(states, batch, None, None)
        return states.to(x.dtype)

    def compute_one(self, x: Tensor, batch: Batch, places: Tensor) -> Tensor:
        """Computes the last hidden states at these places among all pieces, one of every sequence: (s, H)."""
        out = torch.empty(len(places), x.shape[1])
        self._answer(x.float(), batch, places, out)
        return out.to(x.dtype)

    def _answer(self, x: Tensor, batch: Batch, places: Tensor | None, out: Tensor | None) -> None:
        shape = self.shape
        assert batch.starts.dtype == torch.int32
        assert places is None or places.dtype == torch.int64
        longest, rows = max(batch.lengths), min(len(x), ROWS)
        between = x.new_empty(max(longest, rows) * (6 * shape.hidden + 2 * shape.intermediate))
        where = (self.pointers, batch.starts, places, out, between, rows)
        sizes = (self.depth, len(batch.lengths), shape.heads, shape.hidden, shape.intermediate, longest)
        kernels.call(self.kernel, x, *where, *sizes, int(shape.one_way), shape.epsilon)


def _pack_layer(layer: Layer, pack: Callable[[Linear], tuple[Tensor, ...]]) -> list[Tensor]:
    """Packs the weights of a layer, in the order in which the kernels read them."""
    attention, feed_forward = layer.attention, layer.feed_forward
    return [
        *pack(attention.qkv),
        *pack(attention.output),
        *_copy_norm(attention.norm),
        *pack(feed_forward.inner),
        *pack(feed_forward.output),
        *_copy_norm(feed_forward.norm),
    ]


def _copy_norm(norm: AddAndNorm) -> tuple[Tensor, Tensor]:
    return _copy_to_fp32(norm.weight), _copy_to_fp32(norm.bias)
