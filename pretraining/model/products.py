"""Products with a weight. On a GPU, and on a CPU that multiplies bf16, they have a backward pass of our own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model import gpu_operations as gpu
from pretraining.model.own_backward import Gradients, find_apply

TILE_ROWS = 16
WIDE, WORTH = 1024, 600
"""The least width of a weight, and the least multiplications for each transposed number, for which transposing is worth
it on tiles: measured on two cores with AMX, see benchmarks/NOTES.md."""
NARROW = 256
"""The most inputs for which transposing is worth it without tiles, for any outputs: measured with AVX512-BF16."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.t() + bias. The bias gets no gradient in our own backward pass, and should need none."""
    if not _is_ours(x, weight):
        return F.linear(x, weight, bias)
    out: Tensor = _multiply(pad_to_tiles(x), weight, bias)[0]
    return out[: len(x)] if len(out) > len(x) else out


def multiply_and_pass(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns x @ weight.t() + bias, and x itself for a residual connection. The bias gets no gradient.

    In our own backward pass, the product that computes the gradient of x also adds the gradient of the residual, and
    overwrites the latter: a hook there must copy it.
    """
    if gpu.takes_products(x) or _is_ours(x, weight):
        out, residual = _multiply(x, weight, bias)
        return out, residual
    return F.linear(x, weight, bias), x


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether a CPU uses our own backward pass."""
    return can_transpose(x) and weight.dtype == x.dtype and torch.is_grad_enabled()


def can_transpose(x: Tensor) -> bool:
    """Whether gradients of weights may be computed from a transposed operand."""
    fits = x.is_cpu and x.dtype == torch.bfloat16 and x.dim() == 2
    return fits and kernels.usable(x) and kernels.small_products() is not None


def pad_to_tiles(x: Tensor) -> Tensor:
    """Pads x with rows of zeros to a multiple of the rows of a tile; returns x itself where there are no tiles.

    The product takes no longer. For each new number of rows oneDNN would compile code, which takes several times as
    long as the product.
    """
    spare = -len(x) % TILE_ROWS if can_transpose(x) and kernels.has_tiles() else 0
    return F.pad(x, (0, 0, 0, spare)) if spare else x


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Computes the gradient of a weight, grad.t() @ x: (outputs, inputs).

    oneDNN transposes an operand of such a product in every call, which takes about as long as the product itself on
    tiles, and a tenth of it elsewhere. Where it is worth it, our kernel transposes the narrower operand instead.
    """
    if not (can_transpose(x) and is_worth_transposing(len(x), grad.shape[1], x.shape[1])):
        return grad.t() @ x
    if grad.shape[1] <= x.shape[1]:
        return transpose(grad) @ x
    return transpose(transpose(x) @ grad)


def is_worth_transposing(rows: int, outputs: int, inputs: int) -> bool:
    """Whether a weight's gradient is computed faster if an operand is transposed first. Only sizes and the kind of
    processor decide, so that all ranks and a resumed run compute alike."""
    if not kernels.has_tiles():
        return outputs < inputs or inputs <= NARROW
    transposed = outputs * rows if outputs <= inputs else inputs * (rows + outputs)  # then the result too
    return max(outputs, inputs) >= WIDE and rows * outputs * inputs >= WORTH * transposed


def transpose(x: Tensor) -> Tensor:
    """Returns x.t(), contiguous, of 16-bit numbers."""
    out = x.new_empty(x.shape[1], x.shape[0])
    kernels.call("turn", x.contiguous(), out, *x.shape)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)  # the residual may be unused
        return F.linear(x, weight, bias), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_residual: Tensor | None) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError("what our backward passes compute has no gradient")
        if grad is None:
            return grad_residual, None, None
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        grad_weight = weight_gradient(grad, x) if of_weight else None
        return _add_product(grad_residual, grad, weight) if of_x else None, grad_weight, None


_multiply = find_apply(_Product)


def _add_product(gradient: Tensor | None, slope: Tensor, weight: Tensor) -> Tensor:
    """Adds slope @ weight to a gradient if there is one, in place: `addmm` would copy it first. No other layer reads
    it: the gradient of the residual arrives only after the slope of the product has passed through its block.

    If the gradient and the slope share memory, the sum is a new tensor: a product must not overwrite its input.
    """
    if gradient is None:
        return slope @ weight
    memory = gradient.untyped_storage().data_ptr()  # 0 on the meta device
    in_place = gradient.is_contiguous() and not (memory and memory == slope.untyped_storage().data_ptr())
    return gradient.addmm_(slope, weight) if in_place else torch.addmm(gradient, slope, weight)
