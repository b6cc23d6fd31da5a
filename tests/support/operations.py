"""What tests of operations share: inputs, keys of dropout, comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.kernels import kernels_allowed

from pretraining.model.dropout import make_row_keys


def tensors(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def keys_of(rows: int, draw: int = 0) -> torch.Tensor:
    return make_row_keys(draw, np.zeros((1, 2), np.int64), np.arange(rows), np.array([rows]))


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return list(torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs))


@pytest.fixture(params=["kernels", "torch"])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with our kernels, once with PyTorch's operations."""
    with kernels_allowed(request.param == "kernels"):
        yield
