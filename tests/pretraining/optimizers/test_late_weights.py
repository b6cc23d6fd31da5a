"""Weights that begin later than others, as new heads do, are corrected for their own start: against fp64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from support.lamb_reference import LEARNING_RATES, SHAPE, error, first_weights, gradients, make_engine, moved, separate
from support.marks import slow
from support.training import run_connected
from torch import Tensor

from pretraining.config.settings import Optimizer
from pretraining.objectives.declaration import build_model
from pretraining.optimizers.lamb import LambSettings
from pretraining.optimizers.muon import USUAL, orthogonalize

DONE = 5
"""steps before those of the test"""
LATE = {name: 5.0 if name.startswith("next_head") else 3.0 for name in first_weights() if name[:4] in ("pool", "next")}
KINDS = ("adamw", "lamb", "muon")
Found = dict[Any, dict[str, Tensor]]


def reference(ranks: int, kind: str, late: dict[str, float]) -> dict[str, Tensor]:
    """Each optimizer in fp64 on one process, without averages of the steps before."""
    settings = Optimizer.model_validate({"name": kind})
    weights = {name: weight.double() for name, weight in separate(first_weights()).items()}
    means, powers = ({name: weight * 0 for name, weight in weights.items()} for _ in range(2))
    roles = build_model(SHAPE).roles()
    for step, rate in enumerate(LEARNING_RATES, 1):
        for name, gradient in gradients(step - 1, ranks, LambSettings()).items():
            role, own = roles[name.partition("[")[0]], DONE + step - late.get(name, 0.0)
            decay = settings.weight_decay if role.decays else 0.0
            matrix = kind == "muon" and role.kind == "matrix"
            beta = 0.95 if matrix else settings.betas[0]
            means[name] = beta * means[name] + (1 - beta) * gradient
            powers[name] = settings.betas[1] * powers[name] + (1 - settings.betas[1]) * gradient**2
            mean, power = means[name] / (1 - beta**own), powers[name] / (1 - settings.betas[1] ** own)
            change = mean / (power.sqrt() + settings.epsilon) + decay * weights[name]
            if matrix:
                ahead = (1 - beta) * gradient + beta * means[name]
                change = orthogonalize(ahead) * USUAL * math.sqrt(max(ahead.shape)) + decay * weights[name]
            trust = weights[name].norm() / change.norm() if kind == "lamb" and decay else 1.0
            weights[name] = weights[name] - rate * trust * change
    return weights


def on_stages(stages: list[int], kinds: tuple[str, ...]) -> Found:
    """What one rank finds."""
    found = {}
    for zero in stages:
        for kind in kinds:
            engine = make_engine("fp32", zero, {"name": kind}, late=LATE)
            engine.optimizer_steps = float(DONE)
            found[zero, kind] = moved(engine)
            assert engine.optimizer_steps == DONE + len(LEARNING_RATES)
            engine.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "stages", "kinds"), [(1, [1], ("adamw",)), slow(1, [0, 1, 2, 3], KINDS), slow(2, [0, 1, 2, 3], KINDS)]
)
def test_new_weights_are_corrected_for_their_own_start(ranks: int, stages: list[int], kinds: tuple[str, ...]) -> None:
    """Some begin now, others two steps before; without that they would move by other amounts."""
    wanted = {kind: reference(ranks, kind, LATE) for kind in kinds}
    for found in run_connected(ranks, partial(on_stages, stages, kinds), timeout=240):
        for (_, kind), weights in found.items():
            assert error(weights, wanted[kind]) < 2e-5
            assert error(weights, reference(ranks, kind, {})) > 1e-4
