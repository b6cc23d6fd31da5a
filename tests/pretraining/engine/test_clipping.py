"""Norms of gradients, and factors that clip them, against PyTorch's in fp64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.operations import kernels_allowed

from pretraining.engine.buckets import ROW, add_squares, find_clip_factor
from pretraining.model import cpu_kernels as kernels

NEEDS_COMPILER = pytest.mark.skipif(kernels.find_compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize(("ours", "tolerance"), [pytest.param(True, 1e-13, marks=NEEDS_COMPILER), (False, 1e-6)])
@given(sizes=st.lists(st.integers(0, 3 * ROW), min_size=1, max_size=3))
def test_squares_add_up(ours: bool, tolerance: float, sizes: list[int]) -> None:
    with kernels_allowed(ours):
        for size in sizes:
            flat = torch.randn(size, generator=torch.Generator().manual_seed(size))
            assert float(add_squares(flat)) == pytest.approx(float(flat.double().square().sum()), rel=tolerance)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("large", [1e20, 3e38, math.inf])
def test_squares_that_fp32_cannot_hold_are_infinite(ours: bool, large: float) -> None:
    """Such a gradient is left out, since Adam's average of squares would stay infinite."""
    with kernels_allowed(ours):
        assert float(add_squares(torch.tensor([1.0, large, -1.0]))) == math.inf
        assert math.isfinite(float(add_squares(torch.tensor([1.0, 1e19]))))


def test_the_squares_of_many_elements_do_not_stand_still() -> None:
    """In fp32, a sum of ones stands still at 2^24."""
    assert float(add_squares(torch.ones(1).expand(1 << 25))) == 1 << 25


@pytest.mark.parametrize("norm", [0.0, 0.3, 2.0, 50.0, math.inf, math.nan])
def test_clipping_is_pytorchs(norm: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), norm)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    found = torch.full((1,), norm) * find_clip_factor(torch.tensor(norm), 1.0)
    torch.testing.assert_close(found, weight.grad, equal_nan=True)
    if math.isfinite(norm):  # on a CPU the norm is a number, and one that is not finite never comes here
        assert norm * find_clip_factor(norm, 1.0) == pytest.approx(weight.grad.item())
    assert find_clip_factor(norm, 0.0) == 1.0
