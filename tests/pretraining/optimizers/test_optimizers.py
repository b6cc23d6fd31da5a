"""AdamW against PyTorch's own and against the paper's formulas, and what decays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pretraining_reference import SMALL
from support.waits import no_waits
from torch import Tensor, nn

from pretraining.config import settings as recipe
from pretraining.engine.buckets import find_clip_factor
from pretraining.objectives.declaration import build_model
from pretraining.optimizers.declaration import find_optimizer
from pretraining.optimizers.steps.adamw import adam as move_by_adam
from pretraining.optimizers.steps.building import build_optimizer, find_steps, is_decayed
from pretraining.optimizers.steps.flat import FlatOptimizer, FlatTensor, Slice

RATES = [1e-3, 3e-3, 2e-3, 5e-4, 0.0, 1e-3]


def settings(**values: object) -> recipe.Optimizer:
    return recipe.Optimizer.model_validate(values)


def build(groups: list[dict[str, Any]], chosen: recipe.Optimizer) -> FlatOptimizer:
    return find_steps(chosen.name)(find_optimizer(chosen), groups, chosen)


def tensors(seed: int, shapes: tuple[tuple[int, ...], ...] = ((7, 5), (11,))) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trained(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> list[Tensor]:
    """The weights after a step for each of RATES, with gradients that are the same for every optimizer."""
    for step, rate in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for weight, gradient in zip(weights, tensors(step + 1), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_with_bias_correction_it_is_torchs_adamw() -> None:
    chosen = settings(betas=(0.9, 0.98), epsilon=1e-6, weight_decay=0.1)
    ours, theirs = ([tensor.requires_grad_() for tensor in tensors(0)] for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": ours[:1]}, {"params": ours[1:], "weight_decay": 0.0}]
    their_groups: list[dict[str, Any]] = [{"params": theirs[:1]}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(their_groups, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    for a, b in zip(trained(build(groups, chosen), ours), trained(reference, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_biases_and_norms_never_decay_and_all_else_does() -> None:
    wanted = {"embeddings.word.weight", "embeddings.position.weight", "embeddings.segment.weight", "pooler.weight"}
    wanted |= {"masked_head.transform.weight", "next_head.weight"}
    for layer in range(SMALL.layers):
        parts = ("attention.qkv", "attention.output", "feed_forward.inner", "feed_forward.output")
        wanted |= {f"layers.{layer}.{part}.weight" for part in parts}
    names = [name for name, _ in build_model(SMALL).named_parameters()]
    assert {name for name in names if is_decayed(name)} == wanted
    assert "masked_head.bias" in names


def test_every_parameter_is_in_one_group() -> None:
    model = build_model(SMALL)
    decayed, others = build_optimizer(model, settings()).param_groups
    found = [*map(id, decayed["params"]), *map(id, others["params"])]
    assert sorted(found) == sorted(map(id, model.parameters()))
    assert decayed["weight_decay"] == settings().weight_decay
    assert others["weight_decay"] == 0.0


def test_a_parameter_without_gradient_stays() -> None:
    still, moving = (tensor.requires_grad_() for tensor in tensors(0))
    before = still.detach().clone()
    optimizer = build([{"params": [still, moving]}], settings())
    optimizer.param_groups[0]["lr"] = 1e-3
    moving.grad = torch.ones_like(moving)
    optimizer.step()
    assert torch.equal(still, before)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_gradients_are_scaled_within_a_step(name: str, kind: Callable[[float], Tensor | float]) -> None:
    """As clipping has it: the same as if they had come so."""
    chosen, moved = settings(name=name, trust_all=True) if name == "lamb" else settings(), []
    for scaled in (False, True):
        weight = torch.nn.Parameter(tensors(0)[0].clone())
        optimizer = build_optimizer(nn.ParameterDict({"weight": weight}), chosen)
        optimizer.prepare([FlatTensor(weight, {"weight": 35}, (Slice("weight", 0, 35, 0),))], lambda _: 1, {})
        optimizer.scale = kind(0.125) if scaled else 1.0
        for step, rate in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = rate
            weight.grad = tensors(step + 1)[0] * (1.0 if scaled else 0.125)
            optimizer.step()
        moved.append(weight.detach())
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-7)


def test_scaling_does_not_wait_for_a_gpu() -> None:
    lists = [[torch.empty(5, device="meta")] for _ in range(4)]
    counts = [torch.empty((), device="meta")]
    for scale in (0.5, find_clip_factor(torch.empty((), device="meta"), 1.0)):
        with no_waits():
            move_by_adam(lists, counts, settings(), 0.1, 0.0, scale)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_a_scale_that_is_no_number_moves_nothing_and_no_count(bias_correction: bool) -> None:
    """It stays on a GPU, where nobody looks at it: the steps that follow are as if that one had never been."""
    chosen = settings(weight_decay=0.1, bias_correction=bias_correction)
    found = []
    for bad_at in (None, 0, 2):
        weights = [tensor.requires_grad_() for tensor in tensors(0)]
        optimizer = build([{"params": weights}], chosen)
        for step in (0, 1, 2, 3):
            good = torch.tensor(0.5) if bad_at is not None else 0.5
            for scale in ([torch.tensor(torch.nan)] if step == bad_at else []) + [good]:
                for weight, gradient in zip(weights, tensors(step + 1), strict=True):
                    weight.grad = gradient if scale is good else gradient * torch.inf
                optimizer.param_groups[0]["lr"], optimizer.scale = 1e-3, scale
                optimizer.step()
        found.append(
            [*(weight.detach() for weight in weights), *(optimizer.get_state(weight)["step"] for weight in weights)]
        )
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-6, atol=1e-7)
