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

    def rounds(self, weights: Tensor) -> bool:
        return is_ours(weights) and id(weights) in self.rounded

    def move(self, tensors: Sequence[Tensor], learning_rate: float, decay: float) -> None:
        states = [self.state_of(tensor) for tensor in tensors]
        for state in states:
            state["step"] += 1
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        if isinstance(self.scale, float) and all(map(is_ours, [*tensors, *gradients])):
            for tensor, gradient, state in zip(tensors, gradients, states, strict=True):
                rounded = self.rounded.get(id(tensor), tensor)
                move_by_our_kernel(rounded, tensor, gradient, state, self.settings, learning_rate, decay, self.scale)
            return
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        if isinstance(self.scale, Tensor):
            torch._foreach_sub_(steps, [_is_no_number(self.scale)] * len(steps))
        adam(tensors, gradients, first, second, steps, self.settings, learning_rate, decay, self.scale)


def is_ours(flat: Tensor) -> bool:
    """Whether our kernel can work on a flat tensor."""
    return kernels.usable(flat) and flat.dtype == torch.float32 and flat.is_contiguous()


def move_by_our_kernel(
    rounded: Tensor,
    weights: Tensor,
    gradients: Tensor,
    state: Mapping[str, Tensor],
    settings: OptimizerSettings,
    learning_rate: float,
    decay: float,
    scale: float,
) -> None:
    """Moves averages and weights in one pass over memory, which leaves in `rounded` what the weights become; it may be
    the weights themselves."""
    flats = (rounded, weights, gradients, state["exp_avg"], state["exp_avg_sq"])
    factors = (scale, 1.0 - learning_rate * decay, learning_rate)
    kernels.call("adamw", *flats, weights.numel(), *numbers_of(settings, float(state["step"])), *map(float, factors))


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
