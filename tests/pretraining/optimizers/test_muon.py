"""Muon against PyTorch's own, against its iteration in fp64, and against AdamW where it is Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretraining.config import settings as recipe
from pretraining.optimizers.muon import COEFFICIENTS, ROUNDS, orthogonal
from pretraining.optimizers.steps.flat import FlatTensor, Slice, build_optimizer

RATES = [1e-2, 3e-2, 2e-2, 5e-3, 0.0, 1e-2]
SHAPES = [(24, 96), (96, 24), (40, 40)]


def random(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> Tensor:
    """Weights, one below the other, after a step for each of RATES, with gradients that are always the same."""
    shape = (sum(len(weight) for weight in weights), *weights[0].shape[1:])
    for number, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for weight, gradient in zip(weights, random(number + 1, shape).chunk(len(weights)), strict=True):
            weight.grad = gradient
        optimizer.step()
    return torch.cat([weight.detach() for weight in weights])


def ours(parameter: str, begin: Tensor, settings: dict[str, Any], fused_parts: int = 1) -> Tensor:
    """What becomes of a weight that has this name in the model."""
    model = nn.ParameterDict({"only": begin.clone()})
    optimizer = build_optimizer(model, recipe.Optimizer.model_validate(settings))
    weight = model["only"]
    flat = FlatTensor(weight, {parameter: weight.numel()}, (Slice(parameter, 0, weight.numel(), 0),))
    optimizer.prepare([flat], lambda _: fused_parts, {parameter: weight.shape})
    return train(optimizer, [weight])


def pytorchs(begin: Tensor, parts: int) -> Tensor:
    """The same by PyTorch's Muon, as so many matrices."""
    weights = [nn.Parameter(part.clone()) for part in begin.chunk(parts)]
    return train(torch.optim.Muon(weights, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), weights)


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        ("feed_forward.inner", (96, 24), 1),
        ("feed_forward.output", (24, 96), 1),
        ("attention.output", (40, 40), 1),
        ("attention.qkv", (72, 24), 3),
    ],
)
def test_matrices_of_layers_move_as_pytorch_moves_them(name: str, shape: tuple[int, int], parts: int) -> None:
    """PyTorch's iterates in bf16, which has 3 digits. Query, key and value are matrices of their own."""
    begin = random(0, shape)
    found = ours(f"layers.0.{name}.weight", begin, {"name": "muon", "weight_decay": 0.1}, parts)
    wanted = pytorchs(begin, parts)
    assert (found - wanted).norm() < 0.02 * (wanted - begin).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_nearest_orthogonal_matrix_is_that_of_the_plain_iteration(shape: tuple[int, int]) -> None:
    """Also where singular values span three orders of size."""
    matrix = random(3, shape) * torch.logspace(0, -3, shape[1])
    a, b, c = COEFFICIENTS
    plain = matrix.double() / matrix.double().norm()
    for _ in range(ROUNDS):
        square = plain @ plain.T
        plain = a * plain + (b * square + c * square @ square) @ plain
    found = orthogonal(matrix)
    assert (found - plain).norm() < 1e-3 * plain.norm()
    values = torch.linalg.svdvals(orthogonal(random(4, (24, 96))))
    assert 0.65 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize(
    ("name", "shape"),
    [("embeddings.word.weight", (7, 5)), ("masked_head.transform.weight", (5, 5)), ("layers.0.output.bias", (11,))],
)
def test_all_else_moves_as_adamw_has_it(name: str, shape: tuple[int, ...]) -> None:
    common: dict[str, Any] = {"betas": (0.9, 0.98), "epsilon": 1e-6, "weight_decay": 0.1}
    moved = [ours(name, random(0, shape), {"name": kind, **common}) for kind in ("muon", "adamw")]
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-6)
