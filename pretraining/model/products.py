"""Products with a weight; on a CPU with tiles, the gradient of the weight is made from operands as these want them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretraining.model import cpu_kernels as kernels


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.t(), with the bias where there is one, which gets no gradient then."""
    if bias is None and torch.is_grad_enabled() and turns(x):
        return _Product.apply(x, weight)
    return F.linear(x, weight, bias)


def turns(x: Tensor) -> bool:
    """Whether gradients of weights are computed from an operand that is turned around before."""
    return kernels.usable(x) and x.dtype == torch.bfloat16 and x.dim() == 2 and kernels.has_tiles()


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad.t() @ x, (outputs, inputs), for a weight.

    oneDNN turns an operand of such a product around in every call, which takes about as long as the product itself on
    tiles. Our kernel turns the narrower one; then the product is made from rows as they lie.
    """
    if not turns(x):
        return grad.t() @ x
    if grad.shape[1] <= x.shape[1]:
        return turned(grad) @ x
    return turned(turned(x) @ grad)


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
