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


def build_optimizer(model: nn.Module, roles: Mapping[str, Role], settings: OptimizerSettings) -> FlatOptimizer:
    """Makes the optimizer that the settings name, for the weights that decay and those that do not."""
    decayed = [weight for name, weight in model.named_parameters() if roles[name].decays]
    others = [weight for name, weight in model.named_parameters() if not roles[name].decays]
    steps = find_steps(settings.name)
    return steps(find_optimizer(settings), [{"params": decayed}, {"params": others, "weight_decay": 0.0}], settings)
