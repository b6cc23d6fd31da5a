"""Lets autograd run a backward pass of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Inputs = ParamSpec("Inputs")
Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
Losses = tuple[Tensor, Tensor]
"""Losses of predictions and which of them are right, or the sum and the number of these."""
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])
Forward = tuple[Tensor, Saved, Callable[..., Gradients]]
"""The result of a forward pass, the tensors to save, and the backward pass."""
ForwardOfTwo = tuple[tuple[Tensor, Tensor], Saved, Callable[..., Gradients]]
"""The same for two results; one of whole numbers has no gradient."""


def find_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns the `apply` of a function without PyTorch's checks in Python for functional transforms, such as vmap,
    under which none of ours is called."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


class _OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], *inputs: Any) -> Any:
        out, saved, ctx.own_backward = forward(*inputs)
        ctx.save_for_backward(*saved)
        ctx.inputs = len(inputs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError("what our backward passes compute has no gradient")
        given = map(Tensor.contiguous, filter(Tensor.is_floating_point, grads))
        found = ctx.own_backward(*given, *ctx.saved_tensors)
        return None, *found, *[None] * (ctx.inputs - len(found))


def with_backward(
    forward: Callable[Inputs, tuple[Result, Saved, Callable[..., Gradients]]],
) -> Callable[Inputs, Result]:
    """Makes an operation from a forward pass that also returns the tensors to save and its backward pass.

    The backward pass takes the gradients of the results and the saved tensors. It returns the gradients of the first
    inputs; the other inputs get none. The inputs are passed by position.
    """
    return functools.update_wrapper(functools.partial(find_apply(_OwnBackward), forward), forward)
