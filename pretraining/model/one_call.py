"""All layers of an encoder that answers, in one call of our kernels, in fp32 on a CPU.

A small model answers about a short text in less time than Python takes to call an operation for each of its steps.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.batch import Batch
from pretraining.model.encoder import AddAndNorm, Encoder, Layer, Linear
from pretraining.model.shape import Shape

PANEL = 32
"""Columns of a weight that the kernels multiply with at once, on some processors half as many."""


def fits_one_call(encoder: Encoder) -> bool:
    """Whether the kernels know the numbers and the sizes of this encoder."""
    shape, weight = encoder.shape, encoder.embeddings.word.weight
    sizes = (shape.hidden // shape.heads, shape.intermediate)
    return weight.dtype == torch.float32 and kernels.usable(weight) and not any(size % PANEL for size in sizes)


class OneCall:
    """The layers of an encoder, with their weights in panels."""

    def __init__(self, shape: Shape, layers: deque[Layer]) -> None:
        """Takes the layers away one after another: memory is for their weights or for those made of them."""
        self.shape, self.depth = shape, len(layers)
        self.weights: list[Tensor] = []
        while layers:
            self.weights += _weights_of(layers.popleft())
        self.pointers = torch.tensor([weight.data_ptr() for weight in self.weights])

    def all(self, x: Tensor, batch: Batch) -> Tensor:
        """Computes the last hidden states of all pieces, (n, H), in the place of those that it is given."""
        self._answer(x, batch, None, None)
        return x

    def one(self, x: Tensor, batch: Batch, places: Tensor) -> Tensor:
        """Computes the last hidden states at these places among all pieces, one of every sequence: (s, H)."""
        asked = x.new_empty(len(places), x.shape[1])
        self._answer(x, batch, places, asked)
        return asked

    def _answer(self, x: Tensor, batch: Batch, places: Tensor | None, asked: Tensor | None) -> None:
        shape = self.shape
        between = x.new_empty(len(x) * (5 * shape.hidden + shape.intermediate))
        sizes = (self.depth, len(batch.lengths), shape.heads, shape.hidden, shape.intermediate, max(batch.lengths))
        where = (self.pointers, batch.starts, places, asked, between)
        kernels.call("answer", x, *where, *sizes, int(shape.one_way), shape.epsilon)


def _weights_of(layer: Layer) -> list[Tensor]:
    """What a layer computes with, in the order in which the kernels look for it."""
    attention, feed_forward = layer.attention, layer.feed_forward
    return [
        *_packed(attention.qkv),
        *_packed(attention.output),
        *_plain(attention.norm),
        *_packed(feed_forward.inner),
        *_packed(feed_forward.output),
        *_plain(feed_forward.norm),
    ]


def _packed(linear: Linear) -> tuple[Tensor, Tensor]:
    weight = linear.weight.detach().contiguous()
    panels = torch.empty_like(weight)
    kernels.call("pack_panels", weight, panels, *weight.shape)
    return panels, linear.bias.detach().contiguous()


def _plain(norm: AddAndNorm) -> tuple[Tensor, Tensor]:
    return norm.weight.detach().contiguous(), norm.bias.detach().contiguous()
