"""Lets autograd run a backward pass of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Inputs = ParamSpec("Inputs")
Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
Losses = tuple[Tensor, Tensor]
"""Losses of predictions and which of them are right, or the sum and the number of these."""
Result = TypeVar("Result", Tensor, Losses)
Two = tuple[Tensor, Tensor]
"""Two results that both have gradients."""
Forward = tuple[Tensor, Saved, Callable[..., Gradients]]
"""The result of a forward pass, the tensors to save, and the backward pass."""
ForwardOfTwo = tuple[Two, Saved, Callable[..., Gradients]]
ForwardOfLoss = tuple[Losses, Saved, Callable[..., Gradients]]
"""The same for losses; which or how many are right has no gradient."""


class _OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], *inputs: Any) -> Any:
        out, saved, ctx.own_backward = forward(*inputs)
        ctx.save_for_backward(*saved)
        ctx.inputs = len(inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> Gradients:
        found = ctx.own_backward(grad.contiguous(), *ctx.saved_tensors)
        return None, *found, *[None] * (ctx.inputs - len(found))


class _OwnBackwardOfTwo(_OwnBackward):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, second: Tensor) -> Gradients:  # type: ignore[override]
        found = ctx.own_backward(grad.contiguous(), second.contiguous(), *ctx.saved_tensors)
        return None, *found, *[None] * (ctx.inputs - len(found))


def with_backward(
    forward: Callable[Inputs, tuple[Result, Saved, Callable[..., Gradients]]],
) -> Callable[Inputs, Result]:
    """Makes an operation from a forward pass that also returns the tensors to save and its backward pass.

    The backward pass takes the gradient of the result and the saved tensors. It returns the gradients of the first
    inputs; the other inputs get none. The inputs are passed by position.
    """

    @functools.wraps(forward)
    def operation(*inputs: Inputs.args, **named: Inputs.kwargs) -> Result:
        assert not named, "inputs are passed by position"
        return _OwnBackward.apply(forward, *inputs)

    return operation


def with_backward_of_two(forward: Callable[Inputs, ForwardOfTwo]) -> Callable[Inputs, Two]:
    """Makes an operation with two results as `with_backward` does; the backward pass takes the gradients of both."""

    @functools.wraps(forward)
    def operation(*inputs: Inputs.args, **named: Inputs.kwargs) -> Two:
        assert not named, "inputs are passed by position"
        return _OwnBackwardOfTwo.apply(forward, *inputs)

    return operation
