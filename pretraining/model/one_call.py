"""All layers of an encoder that answers, in one call of our kernels, on a CPU: with products in fp32, bf16 or 8 bits,
and all else in fp32.

A small model answers about a short text in less time than Python takes to call an operation for each of its steps.
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
from pretraining.model.encoder import AddAndNorm, Encoder, Layer, Linear
from pretraining.model.quantised import quantise
from pretraining.model.shape import Shape

PANEL = 32
"""Columns of a weight that the kernels multiply with at once, on some processors half as many."""
ROWS = 512
"""Rows that a layer takes at once."""


class Way(NamedTuple):
    """In which numbers products are made."""

    kernel: str
    pack: Callable[[Linear], tuple[Tensor, ...]]
    """what a product is made with, in the order in which the kernel looks for it"""


def _in_panels(kernel: str, linear: Linear) -> tuple[Tensor, ...]:
    """A weight in its own numbers, in the order that the kernel gives it."""
    weight = linear.weight.detach().contiguous()
    panels = torch.empty_like(weight)
    kernels.call(kernel, weight, panels, *weight.shape)
    return panels, _kept(linear.bias)


def _in_bytes(linear: Linear) -> tuple[Tensor, ...]:
    numbers, scales = quantise(linear.weight)
    panels, zeros = torch.empty_like(numbers), torch.empty(len(numbers), dtype=torch.int32)
    kernels.call("pack_bytes", scales, numbers, panels, zeros, *numbers.shape)
    return panels, _kept(linear.bias), scales, zeros


def _kept(weight: Tensor) -> Tensor:
    """A weight in fp32, in memory of its own."""
    return weight.detach().to(torch.float32, copy=True).contiguous()


FLOATS = Way("answer", partial(_in_panels, "pack_floats"))
HALVES = Way("answer_in_halves", partial(_in_panels, "pack_halves"))
BYTES = Way("answer_in_bytes", _in_bytes)


def multiplies(way: Way) -> bool:
    """Whether the kernels have the fastest products of this kind here: where the processor has tiles, oneDNN has."""
    return kernels.knows(way.kernel) and (way is FLOATS or not kernels.has_tiles())


def find_way(encoder: Encoder, in_bytes: bool) -> Way | None:
    """How the kernels go through an encoder; None where they do not know its numbers or its sizes."""
    shape, weight = encoder.shape, encoder.embeddings.word.weight
    fits = not any(size % PANEL for size in (shape.hidden // shape.heads, shape.intermediate))
    if not fits or not kernels.usable(weight):
        return None
    way = BYTES if in_bytes else HALVES if weight.dtype == torch.bfloat16 else FLOATS
    return way if multiplies(way) else None


class OneCall:
    """The layers of an encoder, with their weights in panels."""

    def __init__(self, shape: Shape, layers: deque[Layer], way: Way) -> None:
        """Takes the layers away one after another: memory is for their weights or for those made of them."""
        self.shape, self.depth, self.kernel = shape, len(layers), way.kernel
        self.weights: list[Tensor] = []
        while layers:
            self.weights += _weights_of(layers.popleft(), way.pack)
        self.find_weights()

    def find_weights(self) -> None:
        """Tells the kernels where the weights lie."""
        self.pointers = torch.tensor([weight.data_ptr() for weight in self.weights])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, in this process or another, has its weights elsewhere."""
        vars(self).update(state)
        self.find_weights()

    def all(self, x: Tensor, batch: Batch) -> Tensor:
        """Computes the last hidden states of all pieces, (n, H); in fp32 in the place of those that it is given."""
        states = x.float()
        self._answer(states, batch, None, None)
        return states.to(x.dtype)

    def one(self, x: Tensor, batch: Batch, places: Tensor) -> Tensor:
        """Computes the last hidden states at these places among all pieces, one of every sequence: (s, H)."""
        asked = torch.empty(len(places), x.shape[1])
        self._answer(x.float(), batch, places, asked)
        return asked.to(x.dtype)

    def _answer(self, x: Tensor, batch: Batch, places: Tensor | None, asked: Tensor | None) -> None:
        shape = self.shape
        assert batch.starts.dtype == torch.int32
        assert places is None or places.dtype == torch.int64
        longest, rows = max(batch.lengths), min(len(x), ROWS)
        between = x.new_empty(max(longest, rows) * (6 * shape.hidden + 2 * shape.intermediate))
        where = (self.pointers, batch.starts, places, asked, between, rows)
        sizes = (self.depth, len(batch.lengths), shape.heads, shape.hidden, shape.intermediate, longest)
        kernels.call(self.kernel, x, *where, *sizes, int(shape.one_way), shape.epsilon)


def _weights_of(layer: Layer, packed: Callable[[Linear], tuple[Tensor, ...]]) -> list[Tensor]:
    """What a layer computes with, in the order in which the kernels look for it."""
    attention, feed_forward = layer.attention, layer.feed_forward
    return [
        *packed(attention.qkv),
        *packed(attention.output),
        *_of_norm(attention.norm),
        *packed(feed_forward.inner),
        *packed(feed_forward.output),
        *_of_norm(feed_forward.norm),
    ]


def _of_norm(norm: AddAndNorm) -> tuple[Tensor, Tensor]:
    return _kept(norm.weight), _kept(norm.bias)
