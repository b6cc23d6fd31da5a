"""The step of AdamW on a CPU by our kernel: against the formula in fp64, beside PyTorch's, and what it rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import kernels as kernels_support
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.optimizers.declaration import OptimizerSettings, find_optimizer
from pretraining.optimizers.steps.building import find_steps
from pretraining.optimizers.steps.flat import FlatOptimizer

pytestmark = pytest.mark.skipif(kernels.find_compiler() is None, reason="no C++ compiler")

LENGTH, STEPS, SCALE = 40_007, 4, 0.37
DECAY = 0.1


@pytest.fixture(params=["ours", "theirs"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whose kernel makes the steps."""
    with kernels_support.kernels_allowed(request.param == "ours"):
        yield request.param


def gradients(length: int = LENGTH) -> list[Tensor]:
    """Of very different sizes, some of them 0, as those of words that are in no batch."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.rand(length, generator=generator).mul(12).sub(9)
    found = [torch.randn(length, generator=generator) * 10**sizes for _ in range(STEPS)]
    for gradient in found:
        gradient[length // 3 : length // 2] = 0
    return found


def optimizer_of(weight: Tensor, **values: object) -> FlatOptimizer:
    chosen = OptimizerSettings.model_validate({"weight_decay": DECAY, **values})
    optimizer = find_steps(chosen.name)(find_optimizer(chosen), [{"params": [weight]}], chosen)
    optimizer.scale, optimizer.param_groups[0]["lr"] = SCALE, 1e-3
    return optimizer


def moved(start: Tensor, given: list[Tensor], rounded: Tensor | None = None, **values: object) -> Tensor:
    """A weight after a step for each of these gradients."""
    weight = start.clone()
    optimizer = optimizer_of(weight, **values)
    if rounded is not None:
        optimizer.rounded[id(weight)] = rounded
    for gradient in given:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight


@pytest.mark.parametrize("corrected", [True, False])
def test_weights_are_those_of_the_formula_in_fp64(kernel: str, corrected: bool) -> None:
    start = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))
    found = moved(start, gradients(), bias_correction=corrected)
    weight, first, second = start.double(), torch.zeros(LENGTH).double(), torch.zeros(LENGTH).double()
    for step, gradient in enumerate(gradients(), start=1):
        scaled = gradient.double() * SCALE
        first, second = 0.9 * first + 0.1 * scaled, 0.999 * second + 0.001 * scaled**2
        powers = (0.9**step, 0.999**step) if corrected else (0.0, 0.0)
        update = first / (1 - powers[0]) / ((second / (1 - powers[1])).sqrt() + 1e-6)
        weight = weight * (1 - 1e-3 * DECAY) - 1e-3 * update
    torch.testing.assert_close(found.double(), weight, rtol=STEPS * 2 * 2**-23, atol=1e-7)  # two roundings a step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounded_weights_are_what_a_copy_would_have(dtype: torch.dtype) -> None:
    start, rounded = torch.randn(LENGTH), torch.zeros(LENGTH, dtype=dtype)
    found = moved(start, gradients(), rounded)
    assert torch.equal(rounded, found.to(dtype))
    assert torch.equal(found, moved(start, gradients()))  # and rounding changes nothing else


def test_whoever_asks_hears_whether_weights_are_rounded(kernel: str) -> None:
    weight, rounded = torch.ones(LENGTH), torch.zeros(LENGTH, dtype=torch.bfloat16)
    optimizer = optimizer_of(weight)
    weight.grad = torch.ones(LENGTH)
    optimizer.step()
    assert not optimizer.written  # there was no place for it
    optimizer.rounded[id(weight)] = rounded
    optimizer.step()
    assert optimizer.written == ({id(weight)} if kernel == "ours" else set())
    assert bool(rounded.any()) == (kernel == "ours")


@given(length=st.integers(1, 5000), cut=st.floats(0, 1), threads=st.integers(1, 4))
def test_a_weight_moves_alike_wherever_it_lies(length: int, cut: float, threads: int) -> None:
    """On any rank, by any number of threads: bit for bit."""
    start, given, at = torch.linspace(-1, 1, length), gradients(length), int(cut * length)
    with kernels_support.threads(threads):
        parts = [moved(start[part], [each[part] for each in given]) for part in (slice(at), slice(at, None))]
    assert torch.equal(torch.cat(parts), moved(start, given))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(kernel: str, bad: float) -> None:
    given = gradients()
    given[1][5] = bad
    found = moved(torch.randn(LENGTH), given)
    assert found[5].isnan()
    assert found.isnan().sum() == 1
