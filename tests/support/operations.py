"""Who computes operations between products: PyTorch, our kernels for CPUs, or those for GPUs; their inputs and results.

Where there is no GPU, tensors of the host stand for those on one, and Triton's interpreter runs the kernels in Python.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.marks import has_gpu
from torch import Tensor

from pretraining.model import cpu_kernels
from pretraining.model import gpu_operations as gpu
from pretraining.model.dropout import Dropout, make_row_keys

HOST = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if has_gpu() else HOST
"""Where our kernels for GPUs run."""
ON_DEVICE = [pytest.mark.gpu] if has_gpu() else []
"""The marks of tests that run there."""
KERNELS, TRITON = pytest.param("kernels", marks=pytest.mark.kernels), pytest.param("triton", marks=ON_DEVICE)
by_ours = pytest.mark.parametrize("way", [KERNELS, TRITON])
by_each = pytest.mark.parametrize("way", ["torch", KERNELS, TRITON])
NONE = Dropout(0.0, torch.empty(0, dtype=torch.int32))


@contextmanager
def kernels_allowed(allowed: bool) -> Iterator[None]:
    """This process computes with our kernels or without."""
    cpu_kernels.allow(allowed)
    try:
        yield
    finally:
        cpu_kernels.allow(True)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """This process computes by so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def rounding() -> Iterator[None]:
    """Triton's interpreter, where it runs our kernels, rounds as GPUs do."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from support.triton_kernels import rounding_as_gpus_do

    with nullcontext() if has_gpu() else rounding_as_gpus_do():
        yield


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, tensors of the host take the way of those on one."""
    if not has_gpu():
        patch.setattr(cpu_kernels, "usable", lambda _: False)
        patch.setattr(gpu, "usable", lambda operation, x, *_: x.dtype in gpu.TYPES and operation != "row_keys")
        patch.setattr(gpu, "takes_products", lambda _: True)


@contextmanager
def compute_by(way: str) -> Iterator[torch.device]:
    """Gives the device on which one of the ways of `by_each` computes."""
    if way == "triton":
        with rounding(), pytest.MonkeyPatch.context() as patch:
            as_on_a_gpu(patch)
            yield DEVICE
    else:
        with kernels_allowed(way == "kernels"):
            yield HOST


def tensors(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(operation: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result of an operation and its gradients, by a slope that is drawn, on the host in fp64."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = operation(*leaves)
    out = torch.cat(out) if isinstance(out, tuple) else out
    (slope,) = tensors(9, out.shape)
    found = torch.autograd.grad(out, leaves, slope.to(out))
    return [each.detach().cpu().double() for each in (out, *found)]


def results(way: str, operation: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same by one of the ways of `by_each`."""
    with compute_by(way) as device:
        return with_gradients(operation, [each.to(device) for each in inputs])


def exactly(operation: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same in fp64."""
    return with_gradients(operation, [each.double() for each in inputs])


def same(ours: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float = 2e-6) -> None:
    """To some roundings of the largest number of each tensor."""
    for one, other in zip(ours, exact, strict=True):
        assert one.shape == other.shape
        largest = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)


def keys_of(rows: int, draw: int = 0) -> Tensor:
    """Keys of dropout for the pieces of an example."""
    return make_row_keys(draw, np.zeros((1, 2), np.int64), np.arange(rows), np.array([rows]))


def place(dropout: Dropout, device: torch.device) -> Dropout:
    """The same dropout on a device."""
    return replace(dropout, keys=dropout.keys.to(device))
