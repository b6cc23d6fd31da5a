"""One step of Adam with decoupled decay, by PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pretraining.optimizers.steps.flat import FlatOptimizer

SETTLED = 1 << 30
"""A number of steps after which bias correction corrects nothing."""


class AdamW(FlatOptimizer):
    """Adam with decoupled decay, in PyTorch's fused form; without bias correction where the settings say so."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            with_gradient = [tensor for tensor in group["params"] if tensor.grad is not None]
            if not with_gradient:
                continue
            states = [self.state_of(tensor) for tensor in with_gradient]
            for state in states:
                state["step"] += 1
            adam(
                with_gradient,
                [tensor.grad for tensor in with_gradient],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                group,
                learning_rate=group["lr"],
                decay=group["weight_decay"],
                scale=self.scale,
            )


def adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],
    group: dict[str, Any],
    *,
    learning_rate: float,
    decay: float,
    scale: Tensor | float = 1.0,
) -> None:
    """Moves averages and weights by one step of Adam; `steps` count this one already. May overwrite the gradients."""
    corrected = group["bias_correction"]
    counts = [count - 1 if corrected else torch.full_like(count, SETTLED) for count in steps]  # PyTorch adds the 1
    adamw(
        list(weights),
        list(gradients),
        list(first),
        list(second),
        [],
        counts,
        fused=True,
        grad_scale=_divisor(scale, weights[0].device),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=learning_rate,
        weight_decay=decay,
        eps=group["eps"],
        maximize=False,
    )


def _divisor(scale: Tensor | float, device: torch.device) -> Tensor | None:
    """Turns a factor of the gradients into the divisor that PyTorch's fused Adam takes."""
    if isinstance(scale, Tensor):
        return scale.reciprocal()
    return None if scale == 1.0 else torch.full((), 1 / scale, device=device)
