"""The operations between matrix products on a CPU, by our kernels. `gpu_operations` has the same ones for a GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.cpu_kernels import Masks
from pretraining.model.own_backward import Forward, ForwardOfTwo, Gradients, Losses, with_backward


@with_backward
def gelu(x: Tensor, bias: Tensor, tanh: bool = False) -> Forward:
    """gelu(x + bias), with erf or tanh. Overwrites x."""
    out = torch.empty_like(x)
    kernels.call("gelu_tanh_forward" if tanh else "gelu_forward", x, bias, out, *x.shape)
    return out, (x,), _gelu_backward  # x is now the slope


def _gelu_backward(grad: Tensor, slope: Tensor) -> Gradients:
    grad_x, grad_bias = torch.empty_like(slope), slope.new_empty(slope.shape[1])
    kernels.call("gelu_backward", grad, slope, grad_x, grad_bias, *slope.shape)
    return grad_x, grad_bias


@with_backward
def geglu(x: Tensor) -> Forward:
    """The gelu, with erf, of the left half of each row, times the right half."""
    x = x.contiguous()
    rows, width = len(x), x.shape[1] // 2
    out = x.new_empty(rows, width)
    kernels.call("geglu_forward", x, out, rows, width)
    return out, (x,), _geglu_backward


def _geglu_backward(grad: Tensor, x: Tensor) -> Gradients:
    grad_x = torch.empty_like(x)
    kernels.call("geglu_backward", grad, x, grad_x, *grad.shape)
    return (grad_x,)


@with_backward
def rotate(qkv: Tensor, positions: Tensor, turns: Tensor, heads: int) -> Forward:
    """Rotates queries and keys, in place; the backward pass rotates their gradients back, in place too."""
    sizes = (len(positions), heads, turns.shape[1])
    kernels.call("rotate", qkv, positions, turns, 1.0, *sizes)

    def rotate_back(grad: Tensor, positions: Tensor, turns: Tensor) -> Gradients:
        kernels.call("rotate", grad, positions, turns, -1.0, *sizes)
        return (grad,)

    return qkv, (positions, turns), rotate_back


@with_backward
def add_and_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, masks: Masks
) -> Forward:
    """The layer norm of residual + dropout(x + bias). Overwrites x."""
    out, means, scales = _norm_forward(x, bias, residual, weight, shift, epsilon, masks)
    return out, (x, means, scales, weight), partial(_norm_backward, masks, None)  # x is now the sum that was normalised


@with_backward
def add_then_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, masks: Masks
) -> ForwardOfTwo:
    """residual + dropout(x + bias), which replaces x, and its layer norm."""
    out, means, scales = _norm_forward(x, bias, residual, weight, shift, epsilon, masks)
    return (x, out), (x, means, scales, weight), partial(_norm_backward, masks)


def _norm_forward(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, masks: Masks
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the norm of the sum, which replaces x, and the mean and the scale of every row."""
    out, means, scales = torch.empty_like(x), torch.empty(len(x)), torch.empty(len(x))
    inputs = (x, bias, residual.contiguous(), weight, shift, *masks, epsilon)
    kernels.call("norm_forward", *inputs, out, means, scales, *x.shape)
    return out, means, scales


def _norm_backward(
    masks: Masks, past: Tensor | None, grad: Tensor, total: Tensor, means: Tensor, scales: Tensor, weight: Tensor
) -> Gradients:
    """Computes the gradients from that of the norm and, if given, from `past`: the gradient that the sum gets from
    elsewhere."""
    grad_residual = torch.empty_like(total)
    grad_x = grad_residual if past is not None and not masks[2] else torch.empty_like(total)
    grad_weight, grad_shift, grad_bias = (torch.empty_like(weight) for _ in range(3))
    outputs = (grad_residual, grad_x, grad_weight, grad_shift, grad_bias)
    kernels.call("norm_backward", grad, past, total, means, scales, weight, *masks, *outputs, *total.shape)
    return grad_x, grad_bias, grad_residual, grad_weight, grad_shift


@with_backward
def drop(x: Tensor, masks: Masks) -> Forward:
    """Dropout; the backward pass drops the same elements."""
    return _drop_rows(masks, x), (), lambda grad: (_drop_rows(masks, grad),)


def _drop_rows(masks: Masks, x: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernels.call("dropout_rows", x.contiguous(), *masks, out, *x.shape)
    return out


def cross_entropies(logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool) -> Losses:
    """Computes the cross-entropy of every row, and whether its prediction is right. The bias is added to the logits
    here. With `slopes`, their gradient replaces the logits; otherwise they stay."""
    losses, right = torch.empty(len(labels)), torch.empty(len(labels), dtype=torch.uint8)
    sizes = (len(labels), vocabulary, logits.shape[1])
    kernels.call("cross_entropy", logits, bias, labels, losses, right, *sizes, int(slopes))
    return losses, right
