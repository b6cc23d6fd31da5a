"""The modules that layers of all architectures are made of: products, ends of blocks, tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pretraining.mesh.cuts import Cut
from pretraining.mesh.mesh import ALONE, Mesh, copy_to_tensor_ranks, sum_over_tensor_ranks
from pretraining.model.dropout import Dropout
from pretraining.model.fused import add_and_norm, add_then_norm
from pretraining.model.products import multiply, multiply_and_pass


class LayerDropouts(NamedTuple):
    """The dropouts of a layer."""

    attention: Dropout
    """on the probabilities of attention"""
    context: Dropout
    """on the output of attention"""
    feed_forward: Dropout
    """on the output of the feed-forward block"""


class Product(nn.Module):
    """A product with a weight, of which ranks that share the model hold a part each."""

    cut: Cut = "whole"
    """the way in which they divide the weight"""
    mesh: Mesh = ALONE

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.cut == "columns":
            x = copy_to_tensor_ranks(x, self.mesh)
        product = multiply(x, self.weight)
        return sum_over_tensor_ranks(product, self.mesh) if self.cut == "rows" else product


class Linear(Product):
    """A product with a weight, and a bias that the operation that follows adds."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.zeros(outputs))


class FirstLinear(Linear):
    """The first product of a block, whose input is also that of the residual connection."""

    def forward(self, x: Tensor, add_bias: bool = False) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the product and the input for the residual; `add_bias` adds the bias, which then gets no gradient
        here."""
        bias = self.bias.detach() if add_bias else None
        if self.cut == "columns":
            return multiply(copy_to_tensor_ranks(x, self.mesh), self.weight, bias), x
        return multiply_and_pass(x, self.weight, bias)


class AddAndNorm(nn.Module):
    """The end of a block: dropout, residual connection and layer norm."""

    def __init__(self, hidden: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor, bias: Tensor, residual: Tensor, dropout: Dropout) -> Tensor:
        return add_and_norm(x, bias, residual, self.weight, self.bias, self.epsilon, dropout)


class AddThenNorm(nn.Module):
    """The end of a block whose sum goes on beside its norm: dropout, residual connection and layer norm."""

    def __init__(self, hidden: int, epsilon: float, has_bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden)) if has_bias else None
        self.epsilon = epsilon

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
        """Returns the sum and its norm."""
        return add_then_norm(x, bias, residual, self.weight, self.bias, self.epsilon, dropout)


class LookupTable(nn.Module):
    """A weight whose rows are looked up by index."""

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
