"""What tests of operations share: inputs, keys of dropout, comparisons, and what a deterministic GPU refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import kernels_allowed
from torch.utils._python_dispatch import TorchDispatchMode

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


REFUSED = {
    *("bincount", "cumsum", "histc", "kthvalue", "median", "nanmedian", "put", "put_", "scatter_reduce"),
    *("_ctc_loss_backward", "_embedding_bag", "_embedding_bag_dense_backward", "grid_sampler_2d_backward"),
    *("nll_loss2d_forward", "nll_loss2d_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward"),
    *("_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "reflection_pad1d_backward"),
    "scatter_reduce_",
}
"""What the documentation of torch.use_deterministic_algorithms names, as far as a language model may come near it. What
kernels refuse that stand behind other operations (products, attention) is for tests on a GPU to find."""


class OnlyDeterministic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error at what is in REFUSED, and notes all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        assert name not in REFUSED, f"{name} is not deterministic on a GPU"
        self.seen.add(name)
        return function(*arguments, **(named or {}))
