"""Builds the optimizer that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from data_prep.common.sections import declared_in
from pretraining.model.shape import Role
from pretraining.optimizers.declaration import OptimizerSettings, find_optimizer
from pretraining.optimizers.steps.flat import ByParameter, FlatOptimizer


def find_steps(name: str) -> type[FlatOptimizer]:
    """Finds the class that makes an optimizer's steps: the `STEPS` of the file of its name in this folder.

    An optimizer without such a file moves one parameter after another by its `update`.
    """
    found: type[FlatOptimizer] = declared_in(__file__, __package__, "STEPS").get(name, ByParameter)
    return found


def build_optimizer(
    model: nn.Module, roles: Mapping[str, Role], settings: OptimizerSettings, late: Mapping[str, float] = {}
) -> FlatOptimizer:
    """Makes the optimizer that the settings name, for the weights that decay and those that do not. Those that began
    `late`, after so many steps, are groups of their own, since a flat tensor has one count of steps."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 0.0): [], (False, 0.0): []}
    for name, weight in model.named_parameters():
        groups.setdefault((roles[name].decays, late.get(name, 0.0)), []).append(weight)
    found = [
        {"params": weights, "decays": decays, **({} if decays else {"weight_decay": 0.0})}
        for (decays, _), weights in groups.items()
    ]
    return find_steps(settings.name)(find_optimizer(settings), found, settings)
