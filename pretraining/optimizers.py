"""What turns gradients into weights. DeepSpeed hands these the flat fp32 tensors of this rank's share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from data_prep.errors import UserError
from pretraining import recipe

SETTLED = 1e9
"""a number of steps after which bias correction corrects nothing"""


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled decay, in PyTorch's fused form; without bias correction as the original BERT has it."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: recipe.Optimizer):
        defaults = {
            "lr": 0.0,
            "betas": settings.betas,
            "eps": settings.epsilon,
            "weight_decay": settings.weight_decay,
            "bias_correction": settings.bias_correction,
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            with_gradient = [each for each in group["params"] if each.grad is not None]
            states = [self._state_of(each) for each in with_gradient]
            steps = [state["step"] for state in states]
            if not group["bias_correction"]:
                for each in steps:
                    each += 1
                steps = [torch.full_like(each, SETTLED) for each in steps]
            adamw(
                with_gradient,
                [each.grad for each in with_gradient],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def is_decayed(name: str) -> bool:
    """Decay never falls on biases and norms."""
    return not (name.endswith("bias") or ".norm." in name)


def parameter_groups(model: nn.Module, settings: recipe.Optimizer) -> list[dict[str, Any]]:
    """Those with weight decay, and those without."""
    decayed = [each for name, each in model.named_parameters() if is_decayed(name)]
    others = [each for name, each in model.named_parameters() if not is_decayed(name)]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, settings: recipe.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that the recipe names."""
    if settings.name == "lamb":
        raise UserError('optimizer.name = "lamb": not in this version yet; take "adamw" (--optimizer.name adamw)')
    return AdamW(parameter_groups(model, settings), settings)
