"""One step of Adam with decoupled decay: by a kernel of our own on a CPU, by PyTorch's fused one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pretraining.model import cpu_kernels as kernels
from pretraining.optimizers.declaration import OptimizerSettings
from pretraining.optimizers.steps.flat import FlatOptimizer

SETTLED = 1 << 30
"""A number of steps after which bias correction corrects nothing."""


class AdamW(FlatOptimizer):
    """Adam with decoupled decay; without bias correction where the settings say so."""

    counts_on_host = False  # PyTorch's kernel reads them where the weights are
    keeps_zeros = True  # it multiplies gradients in their place, by the scale; ours leaves them alone

    def _is_ours(self, weights: Tensor) -> bool:
        """Whether our kernel moves them: on a CPU, where the host knows the scale."""
        return isinstance(self.scale, float) and kernels.usable(weights) and weights.dtype == torch.float32

    def move(self, tensors: Sequence[Tensor], learning_rate: float, decay: float) -> None:
        states = [self.state_of(tensor) for tensor in tensors]
        for state in states:
            state["step"] += 1
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        if all(map(self._is_ours, tensors)):
            for tensor, gradient, state in zip(tensors, gradients, states, strict=True):
                self._move_by_our_kernel(tensor, gradient, state, learning_rate, decay)
            return
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        if isinstance(self.scale, Tensor):
            torch._foreach_sub_(steps, [_is_no_number(self.scale)] * len(steps))
        adam(tensors, gradients, first, second, steps, self.settings, learning_rate, decay, self.scale)

    def _move_by_our_kernel(
        self, weights: Tensor, gradients: Tensor, state: Mapping[str, Tensor], learning_rate: float, decay: float
    ) -> None:
        """Moves averages and weights in one pass over memory, which rounds the weights too where they have a place."""
        rounded = self.rounded.get(id(weights), weights)
        flats = (rounded, weights, gradients.contiguous(), state["exp_avg"], state["exp_avg_sq"])
        factors = (self.scale, 1.0 - learning_rate * decay, learning_rate)
        numbers = numbers_of(self.settings, float(state["step"]))
        kernels.call("adamw", *flats, weights.numel(), *numbers, *map(float, factors))
        self.written |= {id(weights)} & self.rounded.keys()


def numbers_of(settings: OptimizerSettings, steps: float) -> tuple[float, ...]:
    """What our kernels make of gradients by Adam: both betas, the corrections of their averages, and epsilon."""
    corrections = [1.0 - beta**steps if settings.bias_correction else 1.0 for beta in settings.betas]
    return (*settings.betas, *corrections, settings.epsilon)


def adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],
    settings: OptimizerSettings,
    learning_rate: float,
    decay: float,
    scale: Tensor | float = 1.0,
) -> None:
    """Moves averages and weights by one step of Adam; `steps` count this one already. May overwrite the gradients.

    A scale on the device that is no number moves nothing, and the host need not look at it.
    """
    corrected = settings.bias_correction
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
        found_inf=_is_no_number(scale) if isinstance(scale, Tensor) else None,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=learning_rate,
        weight_decay=decay,
        eps=settings.epsilon,
        maximize=False,
    )


def _is_no_number(scale: Tensor) -> Tensor:
    """1 where a factor is no number, and 0 otherwise."""
    return scale.isfinite().logical_not().float()


def _divisor(scale: Tensor | float, device: torch.device) -> Tensor | None:
    """Turns a factor of the gradients into the divisor that PyTorch's fused Adam takes."""
    if isinstance(scale, Tensor):
        return scale.reciprocal()
    return None if scale == 1.0 else torch.full((), 1 / scale, device=device)
