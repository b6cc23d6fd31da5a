"""The two operations by which a layer is divided among the ranks of a tensor group: each is the other's backward pass.

    x -> copy_to_tensor_ranks -> products with own columns -> ... -> products with own rows -> sum_over_tensor_ranks

Both return the tensor that was reduced: a gradient may come as a view that is not contiguous, and then it is a copy
that is reduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretraining.mesh.mesh import Mesh


def copy_to_tensor_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """Returns x, which all ranks have alike, for products of which each rank computes a part. The backward pass adds up
    their gradients; it may overwrite the one it gets, which nobody else may read."""
    return x if mesh.tensor_ranks == 1 else _Copy.apply(x, mesh)  # type: ignore[no-untyped-call]


def sum_over_tensor_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """Adds up what the ranks have computed, each a part of the sum. May overwrite x, which nobody else may read."""
    return x if mesh.tensor_ranks == 1 else _Sum.apply(x, mesh)  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.mesh.reduce(grad.contiguous()), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:  # noqa: ARG004
        return mesh.reduce(x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
