"""Muon against PyTorch's own, against its iteration in fp64, on any ranks, and against AdamW where it is Adam."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.optimizer_reference import error, first_weights, make_engine, moved, reference
from support.optimizer_reference import orthogonalize_plainly as plainly
from support.training import run_connected
from support.watches import Launches
from torch import Tensor, nn

from pretraining.config import settings as recipe
from pretraining.engine import gradients
from pretraining.model import cuda_graphs
from pretraining.model.shape import BIAS, HEAD, MATRIX, NORM, TABLE, Role
from pretraining.optimizers.muon import OPTIMIZER as MUON_KIND
from pretraining.optimizers.muon import orthogonalize
from pretraining.optimizers.steps import adamw as adamw_steps
from pretraining.optimizers.steps import flat as flat_steps
from pretraining.optimizers.steps import muon as muon_steps
from pretraining.optimizers.steps.adamw import moves_by_kernel
from pretraining.optimizers.steps.flat import ByParameter, FlatOptimizer, FlatTensor, Slice, build_optimizer

MUON = {"name": "muon", "bias_correction": False}
ROWS = pytest.mark.parametrize("even_rows", [False, True])

RATES = [1e-2, 3e-2, 2e-2, 5e-3, 0.0, 1e-2]


def random(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], size: float = 1.0) -> Tensor:
    """Weights, one below the other, after a step for each of RATES, with gradients that are always the same, of a
    size."""
    shape = (sum(len(weight) for weight in weights), *weights[0].shape[1:])
    for number, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for weight, gradient in zip(weights, (size * random(number + 1, shape)).chunk(len(weights)), strict=True):
            weight.grad = gradient
        optimizer.step()
    return torch.cat([weight.detach() for weight in weights])


def ours(role: Role, begin: Tensor, settings: dict[str, Any], size: float = 1.0) -> Tensor:
    """What becomes of a weight with this role."""
    model = nn.ParameterDict({"only": begin.clone()})
    optimizer = build_optimizer(model, {"only": role}, recipe.Optimizer.model_validate(settings))
    weight = model["only"]
    flat = FlatTensor(weight, {"only": weight.numel()}, (Slice("only", 0, weight.numel(), 0),))
    optimizer.prepare([flat], {"only": role}, {"only": weight.shape})
    return train(optimizer, [weight], size)


def pytorchs(begin: Tensor, parts: int, size: float) -> Tensor:
    """The same by PyTorch's Muon, as so many matrices."""
    weights = [nn.Parameter(part.clone()) for part in begin.chunk(parts)]
    return train(torch.optim.Muon(weights, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), weights, size)


@pytest.mark.parametrize(("shape", "parts"), [((96, 24), 1), ((24, 96), 1), ((40, 40), 1), ((72, 24), 3)])
@pytest.mark.parametrize("size", [1.0, 1e-7])
def test_matrices_of_layers_move_as_pytorch_has_it(shape: tuple[int, int], parts: int, size: float) -> None:
    """PyTorch's iterates in bf16, which has 3 digits. Query, key and value are matrices of their own, and what they
    are given in the first steps is as small as this."""
    begin = random(0, shape)
    found = ours(MATRIX._replace(parts=parts), begin, {"name": "muon", "weight_decay": 0.1}, size)
    wanted = pytorchs(begin, parts, size)
    assert (found - wanted).norm() < 0.02 * (wanted - begin).norm()


@pytest.mark.parametrize("shape", [(96, 24), (24, 96)])
def test_even_rows_first_move_by_one_size(shape: tuple[int, int]) -> None:
    """That of an update of Adam, whatever the sizes of their gradients; a row without a gradient stays."""
    weight, gradient, squares = (
        torch.zeros(shape),
        random(1, shape) * torch.logspace(0, -3, shape[0])[:, None],
        torch.zeros(shape),
    )
    gradient[3] = 0.0
    averages = {"exp_avg": torch.zeros(shape), "exp_avg_sq": squares}
    settings = recipe.Optimizer.model_validate({"name": "muon", "even_rows": True})
    change = MUON_KIND.update(MATRIX, weight, gradient, averages, torch.tensor(1.0), settings)
    moving = [row for row in range(shape[0]) if row != 3]
    sizes = change.square().mean(1).sqrt()
    wanted = torch.tensor(0.2 * (shape[0] / len(moving)) ** 0.5).expand(len(moving))
    torch.testing.assert_close(sizes[moving], wanted, rtol=1e-5, atol=0.0)
    assert not change[3].any()


PARTS: dict[str, tuple[Role, tuple[int, ...]]] = {
    "tall": (MATRIX, (24, 16)),
    "bias": (BIAS, (7,)),
    "fused": (MATRIX._replace(parts=3), (48, 16)),
    "wide": (MATRIX, (16, 24)),
    "table": (TABLE, (9, 16)),
}
"""The weights of a layer."""


Place = tuple[bool, bool]
"""Whether the factor of gradients, and whether the learning rate, are tensors on the device."""
GPU, CPU = (True, True), (False, False)
"""ZeRO's stage and the number format also make one of them a tensor and the other not."""


def move_layers(
    layers: int,
    steps: type[FlatOptimizer],
    place: Place,
    patch: pytest.MonkeyPatch,
    scales: Sequence[float] = (1.0,) * len(RATES),
    even_rows: bool = False,
    same_bits: bool = False,
) -> tuple[list[list[Tensor]], int]:
    """Moves layers in one flat tensor: weights, averages and number of steps after each step, and the launches of the
    last."""
    on_device, has_rate_tensor = place
    patch.setattr(flat_steps, "needs_rate_tensor", lambda _: has_rate_tensor)
    patch.setattr(adamw_steps, "moves_by_kernel", lambda weights: not has_rate_tensor and moves_by_kernel(weights))
    known = {f"{name}.{layer}": each for layer in range(layers) for name, each in PARTS.items()}
    roles = {name: role for name, (role, _) in known.items()}
    shapes = {name: torch.Size(shape) for name, (_, shape) in known.items()}
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    ends = list(accumulate(sizes.values()))
    parts = tuple(Slice(name, 0, size, end - size) for (name, size), end in zip(sizes.items(), ends, strict=True))
    together = random(7, (ends[-1],))
    settings = recipe.Optimizer.model_validate({"name": "muon", "weight_decay": 0.1, "even_rows": even_rows})
    optimizer = steps(MUON_KIND, [{"params": [together]}], settings)
    optimizer.prepare([FlatTensor(together, sizes, parts)], roles, shapes)
    optimizer.same_bits = same_bits
    found = []
    for step, (scale, rate) in enumerate(zip(scales, RATES, strict=True)):
        together.grad, optimizer.scale = random(step + 1, together.shape), torch.tensor(scale) if on_device else scale
        optimizer.param_groups[0]["lr"] = rate
        with Launches() as launches:
            optimizer.step()
        found.append([each.clone() for each in (together, *optimizer.get_state(together).values())])
    return found, launches.count


@ROWS
@pytest.mark.parametrize("most", [1 << 24, 2 * 24 * 16, 1])
@pytest.mark.parametrize("place", [GPU, CPU, (True, False), (False, True)])
def test_together_matrices_move_as_one_by_one(
    most: int, place: Place, even_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host has not checked gradients, a step whose gradient is not finite moves nothing, to the bit."""
    monkeypatch.setattr(muon_steps, "STACK", {"cpu": most})
    scales = [1.0, 0.5, math.nan, 0.1, 1.0, math.inf] if place[0] else [1.0, 0.5, 0.2, 0.1, 1.0, 2.0]
    (found, _), (wanted, _) = (
        move_layers(3, steps, place, monkeypatch, scales, even_rows) for steps in (muon_steps.Muon, ByParameter)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    for skipped in (2, 5) if place[0] else ():
        assert all(map(torch.equal, found[skipped], found[skipped - 1]))


def test_the_launches_of_a_step_do_not_depend_on_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (move_layers(layers, muon_steps.Muon, GPU, monkeypatch)[1] for layers in (1, 4))
    assert few == many


@pytest.mark.parametrize(("same_bits", "together"), [(False, {4, 12}), (True, {1})])
def test_matrices_of_one_shape_are_multiplied_together(
    same_bits: bool, together: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `same_bits` each is multiplied alone: bits must not depend on how many a rank holds."""
    watch = Mock(wraps=orthogonalize)
    monkeypatch.setattr(muon_steps, "orthogonalize", watch)
    move_layers(4, muon_steps.Muon, CPU, monkeypatch, same_bits=same_bits)
    assert {len(call.args[0]) for call in watch.call_args_list} == together


@pytest.mark.parametrize("shape", [(24, 96), (96, 24), (40, 40)])
def test_the_nearest_orthogonal_matrix_is_that_of_the_plain_iteration(shape: tuple[int, int]) -> None:
    """Also where singular values span three orders of size."""
    matrix = random(3, shape) * torch.logspace(0, -3, shape[1])
    assert (orthogonalize(matrix) - plainly(matrix)).norm() < 1e-3 * plainly(matrix).norm()
    values = torch.linalg.svdvals(orthogonalize(random(4, (24, 96))))
    assert 0.65 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("shape", [(256, 64), (96, 96)])
def test_in_16_bits_it_is_as_near_as_their_digits_allow(
    shape: tuple[int, int], dtype: torch.dtype, digits: float
) -> None:
    """Also where a few directions have nearly all of the gradient, as they have in training."""
    sides = [torch.linalg.qr(random(seed, (rows, min(shape))))[0] for seed, rows in enumerate(shape)]
    matrix = sides[0] * torch.logspace(0, -3, min(shape)) @ sides[1].T
    with torch.autocast("cpu", dtype):
        found = orthogonalize(matrix)
    assert found.dtype == dtype
    assert (found - plainly(matrix)).norm() < digits * plainly(matrix).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nearest_orthogonal_matrix_does_not_depend_on_the_size(dtype: torch.dtype) -> None:
    """Down to where PyTorch's own does, which divides by the norm, or by 1e-7 where that is more."""
    matrix = random(5, (24, 96)).to(dtype)
    wanted = orthogonalize(matrix).float()
    for exponent in (10, -10, -20, -28):
        torch.testing.assert_close(orthogonalize(2.0**exponent * matrix).float(), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.equal(orthogonalize(2.0**-60 * matrix).float(), wanted)


@pytest.mark.parametrize(("role", "shape"), [(TABLE, (7, 5)), (HEAD, (5, 5)), (BIAS, (11,)), (NORM, (11,))])
def test_all_else_moves_as_adamw_has_it(role: Role, shape: tuple[int, ...]) -> None:
    common: dict[str, Any] = {"betas": (0.9, 0.98), "epsilon": 1e-6, "weight_decay": 0.1}
    moved = [ours(role, random(0, shape), {"name": kind, **common}) for kind in ("muon", "adamw")]
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-6)


def on_all_stages(even_rows: bool) -> dict[Any, Any]:
    """What one rank finds."""
    chosen = {**MUON, "even_rows": even_rows}
    found: dict[Any, Any] = {zero: moved(make_engine("fp32", zero, chosen)) for zero in range(4)}
    found |= {("offloaded", zero): moved(make_engine("fp32", zero, chosen, offload="optimizer")) for zero in (1, 2, 3)}
    found |= {("bf16", zero): moved(make_engine("bf16", zero, chosen)) for zero in (1, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_steps, "needs_rate_tensor", lambda _: True)
        patch.setattr(adamw_steps, "moves_by_kernel", lambda _: False)
        patch.setattr(cuda_graphs, "capture", lambda work: (work, None))
        found |= {("as on a GPU", zero): moved(make_engine("fp32", zero, chosen)) for zero in range(4)}
        patch.setattr(gradients, "stays_on_device", lambda _: True)
        found["as on a GPU that checks gradients", 1] = moved(make_engine("fp32", 1, chosen))
    return found


@ROWS
@pytest.mark.slow
def test_it_is_muon_on_three_ranks(even_rows: bool) -> None:
    results = run_connected(3, partial(on_all_stages, even_rows), timeout=240)
    wanted, _ = reference(3, {**MUON, "even_rows": even_rows})
    assert error(first_weights(), wanted) > 1e-3, "nothing has moved"
    for result in results:
        for zero in (1, 3):
            rounded = error(result.pop(("bf16", zero)), wanted)
            assert 1e-6 < rounded < 5e-5, "matrix products are in 16 bits, and nothing else"
        assert max(error(weights, wanted) for weights in result.values()) < 2e-5
