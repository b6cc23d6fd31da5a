"""Products with a weight, whose backward pass is ours on a GPU and on a CPU that multiplies bf16.

On tiles, rows are rounded up too: see `rounded`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretraining.model import cpu_kernels as kernels
from pretraining.model import gpu_operations as gpu

TILE_ROWS = 16
WIDE, WORTH = 1024, 600
"""From which width of a weight on, and for how many multiplications to a number that is turned, turning pays on tiles:
measured on two cores with AMX, see benchmarks/NOTES.md."""
NARROW = 256
"""Up to how many inputs turning pays without tiles, whatever the outputs: measured likewise with AVX512-BF16."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.t()"""
    if not _is_ours(x, weight):
        return F.linear(x, weight)
    out: Tensor = _Product.apply(rounded(x), weight)
    return out[: len(x)] if len(out) > len(x) else out


def product_and_past(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x @ weight.t() + bias, and x itself, for what goes past the product.

    Where our own backward pass takes over, the product that makes the gradient of x adds that of what went past. The
    bias gets no gradient. That sum takes the place of the gradient of what went past: a hook there must copy it.
    """
    if gpu.takes_products(x) or _is_ours(x, weight):
        return _ProductAndPast.apply(x, weight, bias)
    return F.linear(x, weight, bias), x


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether our backward pass takes over on a CPU."""
    return turns(x) and weight.dtype == x.dtype and torch.is_grad_enabled()


def turns(x: Tensor) -> bool:
    """Whether gradients of weights are computed from an operand that is turned around before."""
    return kernels.usable(x) and x.dtype == torch.bfloat16 and x.dim() == 2 and kernels.small_products() is not None


def rounded(x: Tensor) -> Tensor:
    """x, with rows of zeros behind it to a multiple of what a tile has; x itself where there are no tiles.

    The product takes no longer. oneDNN makes code for every new number of rows, which takes several times as long.
    """
    spare = -len(x) % TILE_ROWS if turns(x) and kernels.has_tiles() else 0
    return F.pad(x, (0, 0, 0, spare)) if spare else x


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad.t() @ x, (outputs, inputs), for a weight.

    oneDNN turns an operand of such a product around in every call, which takes about as long as the product itself on
    tiles, and a tenth of it elsewhere. Where it pays, our kernel turns the narrower one; then the product is made from
    rows as they lie.
    """
    if not (turns(x) and pays(len(x), grad.shape[1], x.shape[1])):
        return grad.t() @ x
    if grad.shape[1] <= x.shape[1]:
        return turned(grad) @ x
    return turned(turned(x) @ grad)


def pays(rows: int, outputs: int, inputs: int) -> bool:
    """Whether a weight's gradient is made sooner by turning an operand first. Sizes and the kind of processor decide
    alone, so that all ranks and a run that goes on compute alike."""
    if not kernels.has_tiles():
        return outputs < inputs or inputs <= NARROW
    numbers = outputs * rows if outputs <= inputs else inputs * (rows + outputs)  # that are turned: the result too
    return max(outputs, inputs) >= WIDE and rows * outputs * inputs >= WORTH * numbers


def turned(x: Tensor) -> Tensor:
    """x.t(), contiguous, of 16-bit numbers."""
    out = x.new_empty(x.shape[1], x.shape[0])
    kernels.call("turn", x.contiguous(), out, *x.shape)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return grad @ weight if of_x else None, weight_gradient(grad, x) if of_weight else None


class _ProductAndPast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_past: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        grad_weight = weight_gradient(grad, x) if of_weight else None
        return _added(grad_past, grad, weight) if of_x else None, grad_weight, None


def _added(gradient: Tensor, slope: Tensor, weight: Tensor) -> Tensor:
    """gradient + slope @ weight, in the place of the gradient: `addmm` alone would copy it first. No layer reads it any
    more, since what comes from beside the product has gone through all that the product's own slope has."""
    return gradient.addmm_(slope, weight) if gradient.is_contiguous() else torch.addmm(gradient, slope, weight)
