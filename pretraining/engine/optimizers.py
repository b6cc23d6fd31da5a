"""What turns gradients into weights: which optimizer, and what decays."""

from __future__ import annotations

from typing import Any

from torch import nn

from pretraining.config.settings import Optimizer
from pretraining.engine.adamw import AdamW
from pretraining.engine.lamb import Lamb


def is_decayed(name: str) -> bool:
    """Whether weight decay falls on a parameter: never on biases and norms."""
    return not (name.endswith("bias") or ".norm." in name)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups parameters: those with weight decay, and those without."""
    decayed = [weight for name, weight in model.named_parameters() if is_decayed(name)]
    others = [weight for name, weight in model.named_parameters() if not is_decayed(name)]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, settings: Optimizer) -> AdamW:
    """Makes the optimizer that the recipe names."""
    kind = Lamb if settings.name == "lamb" else AdamW
    return kind(parameter_groups(model), settings)
