"""AdamW against PyTorch's own and the formula in fp64, by either kernel, and what decays."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import operations
from support.marks import slow
from support.optimizer_reference import LEARNING_RATES, error, first_weights, make_engine, reference
from support.optimizer_reference import moved as move_by_forces
from support.pretraining_reference import SMALL
from support.training import run_connected
from support.watches import no_waits
from torch import Tensor

from pretraining.engine.buckets import find_clip_factor
from pretraining.model import cpu_kernels as kernels
from pretraining.objectives.declaration import build_model
from pretraining.optimizers.declaration import OptimizerSettings, find_optimizer
from pretraining.optimizers.steps.flat import FlatOptimizer, build_optimizer, find_steps

LENGTH, STEPS, SCALE, DECAY = 40_007, 4, 0.37, 0.1
NEEDS_COMPILER = pytest.mark.skipif(kernels.find_compiler() is None, reason="no C++ compiler")


def make_tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((7, 5), (11,))]


def divide(weights: list[Tensor]) -> list[dict[str, Any]]:
    """The first decays; others do not."""
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    return groups[: len(weights)]


def make_optimizer(weights: list[Tensor], **values: object) -> FlatOptimizer:
    chosen = OptimizerSettings.model_validate({"weight_decay": DECAY, **values})
    return find_steps(chosen.name)(find_optimizer(chosen), divide(weights), chosen)


def make_step(optimizer: Any, weights: list[Tensor], gradients: list[Tensor], rate: float = 1e-3) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    optimizer.step()


def test_with_bias_correction_it_is_torchs_adamw() -> None:
    ours, theirs = ([tensor.requires_grad_() for tensor in make_tensors(0)] for _ in range(2))
    optimizer = make_optimizer(ours, betas=(0.9, 0.98), epsilon=1e-6)
    reference = torch.optim.AdamW(divide(theirs), betas=(0.9, 0.98), eps=1e-6, weight_decay=DECAY)
    for step, rate in enumerate([1e-3, 3e-3, 2e-3, 5e-4, 0.0, 1e-3]):
        make_step(optimizer, ours, make_tensors(step + 1), rate)
        make_step(reference, theirs, make_tensors(step + 1), rate)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_biases_and_norms_never_decay_and_all_else_does() -> None:
    wanted = {"embeddings.word.weight", "embeddings.position.weight", "embeddings.segment.weight", "pooler.weight"}
    wanted |= {"masked_head.transform.weight", "next_head.weight"}
    for layer in range(SMALL.layers):
        parts = ("attention.qkv", "attention.output", "feed_forward.inner", "feed_forward.output")
        wanted |= {f"layers.{layer}.{part}.weight" for part in parts}
    roles = build_model(SMALL).roles()
    assert {name for name, role in roles.items() if role.decays} == wanted
    assert "masked_head.bias" in roles


def test_every_parameter_is_in_one_group() -> None:
    model = build_model(SMALL)
    decayed, others = build_optimizer(model, model.roles(), OptimizerSettings()).param_groups
    found = [*map(id, decayed["params"]), *map(id, others["params"])]
    assert sorted(found) == sorted(map(id, model.parameters()))
    assert decayed["weight_decay"] == OptimizerSettings().weight_decay
    assert others["weight_decay"] == 0.0


def test_a_parameter_without_gradient_stays() -> None:
    moving, still = (tensor.requires_grad_() for tensor in make_tensors(0))
    before = still.detach().clone()
    make_step(make_optimizer([moving, still]), [moving], [torch.ones_like(moving)])
    assert torch.equal(still, before)


def test_scaling_does_not_wait_for_a_gpu() -> None:
    weights = [torch.empty(5, device="meta")]
    optimizer = make_optimizer(weights)
    for scale in (0.5, find_clip_factor(torch.empty((), device="meta"), 1.0)):
        optimizer.scale = scale
        with no_waits():
            make_step(optimizer, weights, weights)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_a_scale_that_is_no_number_moves_nothing_and_no_count(bias_correction: bool) -> None:
    """It stays on a GPU, where nobody looks at it: the steps that follow are as if that one had never been."""
    found = []
    for bad_at in (None, 0, 2):
        weights = [tensor.requires_grad_() for tensor in make_tensors(0)]
        optimizer = make_optimizer(weights, bias_correction=bias_correction)
        for step in range(4):
            if step == bad_at:
                optimizer.scale = torch.tensor(torch.nan)
                make_step(optimizer, weights, [each * torch.inf for each in make_tensors(step + 1)])
            optimizer.scale = 0.5 if bad_at is None else torch.tensor(0.5)
            make_step(optimizer, weights, make_tensors(step + 1))
        found.append([*(each.detach() for each in weights), *(optimizer.get_state(each)["step"] for each in weights)])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-6, atol=1e-7)


@pytest.fixture(params=[pytest.param("ours", marks=NEEDS_COMPILER), "theirs"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whose kernel makes the steps."""
    with operations.kernels_allowed(request.param == "ours"):
        yield request.param


def gradients(length: int = LENGTH) -> list[Tensor]:
    """Of very different sizes, some of them 0, as those of words that are in no batch."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.rand(length, generator=generator).mul(12).sub(9)
    found = [torch.randn(length, generator=generator) * 10**sizes for _ in range(STEPS)]
    for gradient in found:
        gradient[length // 3 : length // 2] = 0
    return found


def moved(start: Tensor, given: list[Tensor], rounded: Tensor | None = None, **values: object) -> Tensor:
    """A weight after a step for each of these gradients."""
    weight = start.clone()
    optimizer = make_optimizer([weight], **values)
    optimizer.scale = SCALE
    if rounded is not None:
        optimizer.rounded[id(weight)] = rounded
    for gradient in given:
        make_step(optimizer, [weight], [gradient])
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
def test_rounded_weights_are_what_a_copy_would_have(kernel: str, dtype: torch.dtype) -> None:
    start, rounded = torch.randn(LENGTH), torch.zeros(LENGTH, dtype=dtype)
    found = moved(start, gradients(), rounded)
    assert torch.equal(rounded, found.to(dtype))
    assert torch.equal(found, moved(start, gradients()))  # and rounding changes nothing else


@NEEDS_COMPILER
@given(length=st.integers(1, 5000), cut=st.floats(0, 1), threads=st.integers(1, 4))
def test_a_weight_moves_alike_wherever_it_lies(length: int, cut: float, threads: int) -> None:
    """On any rank, by any number of threads: bit for bit."""
    start, given, at = torch.linspace(-1, 1, length), gradients(length), int(cut * length)
    with operations.threads(threads):
        parts = [moved(start[part], [each[part] for each in given]) for part in (slice(at), slice(at, None))]
    assert torch.equal(torch.cat(parts), moved(start, given))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(kernel: str, bad: float) -> None:
    given = gradients()
    given[1][5] = bad
    found = moved(torch.randn(LENGTH), given)
    assert found[5].isnan()
    assert found.isnan().sum() == 1


DONE, KINDS = 5, ("adamw", "lamb", "muon")
LATE = {name: 5.0 if name.startswith("next_head") else 3.0 for name in first_weights() if name[:4] in ("pool", "next")}


def move_on_stages(stages: list[int]) -> dict[tuple[int, str], dict[str, Tensor]]:
    """What one rank finds after `DONE` steps before."""
    found = {}
    for zero, kind in product(stages, KINDS):
        engine = make_engine("fp32", zero, {"name": kind}, late=LATE)
        engine.optimizer_steps = float(DONE)
        found[zero, kind] = move_by_forces(engine)
        assert engine.optimizer_steps == DONE + len(LEARNING_RATES)
        engine.close()
    return found


@pytest.mark.parametrize(("ranks", "stages"), [(1, [1]), slow(2, [0, 1, 2, 3])])
def test_new_weights_are_corrected_for_their_own_start(ranks: int, stages: list[int]) -> None:
    """As of new heads: some begin now, others two steps before; without that they would move by other amounts."""
    late, early = (
        {kind: reference(ranks, {"name": kind}, *more)[0] for kind in KINDS} for more in ((LATE, DONE), ({}, DONE))
    )
    for found in run_connected(ranks, partial(move_on_stages, stages), timeout=240):
        for (_, kind), weights in found.items():
            assert error(weights, late[kind]) < 2e-5
            assert error(weights, early[kind]) > 1e-4
