"""An encoder that only answers: with weights that are packed once, and of the last layer what the head sees.

Training cannot pack weights, which change in every step. On a CPU our kernels go through all layers in one call, with
weights in their own order (`one_call.py`). For sizes and numbers that they do not know, the encoder goes through its
layers as in training, but products multiply with packed weights: an x86 processor multiplies fastest with weights in an
order that oneDNN chooses. Elsewhere, and where this PyTorch lacks the operators, weights stay as they lie. Results are
the same but for rounding.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from pretraining.model import cpu_kernels as kernels
from pretraining.model.batch import Batch
from pretraining.model.encoder import Encoder, FirstLinear, Layer, Linear
from pretraining.model.fused import Dropout
from pretraining.model.one_call import OneCall, find_way
from pretraining.model.quantised import quantise

KEEPS = Dropout(0.0, torch.empty(0, dtype=torch.int32))
"""Answers drop nothing."""


class PackedProduct:
    """Multiplies with the weight in the order that oneDNN chooses."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return product


class QuantisedProduct:
    """Multiplies with the weight in 8 bits, with a scale for each output and one for each row of the input.

    So the answer about a text does not depend on its neighbours in a batch.
    """

    ZERO = 128
    """The byte that stands for 0 on the left of a product; on the right it is 0."""

    def __init__(self, weight: Tensor) -> None:
        numbers, self.scales = quantise(weight)
        self.zeros = torch.zeros(len(numbers), dtype=torch.int64)
        self.weight = torch.ops.onednn.qlinear_prepack(numbers, None)

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(len(x))
        kernels.call("quantise_rows", x.contiguous(), numbers, scales, *x.shape)
        ours, theirs = (numbers, 1.0, self.ZERO), (self.weight, self.scales, self.zeros)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(*ours, *theirs, None, 1.0, 0, x.dtype, "none", [], "")
        kernels.call("rescale_rows", product, scales, *product.shape)
        return product


class ServedLinear(nn.Module):
    """Takes the place of a linear layer on a CPU, with a product of its own."""

    def __init__(self, linear: Linear, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bias, self.product = linear.bias.detach(), product
        self.is_first = isinstance(linear, FirstLinear)

    def forward(self, x: Tensor, add_bias: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The product; of the first layer of a block also what goes past it."""
        assert not add_bias, "the layouts of a GPU alone ask for it"
        return (self.product(x), x) if self.is_first else self.product(x)


def can_pack(weight: Tensor) -> bool:
    """Whether a weight can be packed: on an x86 CPU, by this PyTorch, and in numbers that both are fast in."""
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())


def replace_products(module: nn.Module, make: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
    """Replaces all linear layers one after another: memory is for a weight or for what is made of it."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, ServedLinear(child, make(child.weight)))
        else:
            replace_products(child, make)


class ServedEncoder:
    """An encoder that answers and does not learn. It takes the layers of the one that it is made of."""

    def __init__(self, encoder: Encoder, in_bytes: bool = False) -> None:
        """`in_bytes`: products are made in 8 bits."""
        self.encoder = encoder.eval().requires_grad_(False)
        self.one_call: OneCall | None = None
        if (way := find_way(encoder, in_bytes)) is not None:
            layers = deque(cast(Layer, layer) for layer in encoder.layers)
            encoder.layers = nn.ModuleList()
            self.one_call = OneCall(encoder.shape, layers, way)
        elif in_bytes:
            replace_products(encoder.layers, QuantisedProduct)
        elif can_pack(encoder.embeddings.word.weight):
            replace_products(encoder.layers, PackedProduct)
            encoder.packed = True

    def all(self, batch: Batch) -> Tensor:
        """Computes the last hidden states, (n, H)."""
        if self.one_call is None:
            return self.encoder.encode(batch)
        return self.encoder.in_order(self.one_call.all(self._embedded(batch), batch), batch)

    def one(self, batch: Batch, places: Tensor) -> Tensor:
        """Computes the last hidden states at these places among all pieces, one of every sequence: (s, H)."""
        if self.one_call is None:
            return self.encoder.encode(batch, places)
        places = batch.turns()[places] if self.encoder.shape.sees == "after" else places
        return self.one_call.one(self._embedded(batch), batch, places)

    def _embedded(self, batch: Batch) -> Tensor:
        return self.encoder.embeddings(self.encoder.laid(batch), KEEPS)
