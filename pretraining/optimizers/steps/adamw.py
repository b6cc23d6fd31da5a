"""One step of Adam with decoupled decay: by a kernel of our own on a CPU, by PyTorch's fused one elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.optimizers.declaration import OptimizerSettings
from pretraining.optimizers.steps.flat import FlatOptimizer, Rate

SETTLED = 1 << 30
"""A number of steps after which bias correction has no effect."""


class AdamW(FlatOptimizer):
    """Adam with decoupled decay; without bias correction where the settings say so."""

    keeps_zeros = True  # PyTorch's step scales gradients in place; our kernel does not write them
    asks_ranks = False

    def move(self, tensors: Sequence[Tensor], learning_rate: Rate, decay: float) -> None:
        steps = self.count_step(tensors)
        states = [self.get_state(tensor) for tensor in tensors]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        first, second = ([state[name] for state in states] for name in self.kind.state)
        move_by_adam(self, (tensors, gradients, first, second, steps), learning_rate, decay)


def moves_by_kernel(weights: Tensor) -> bool:
    """Whether our kernel can move these weights: on a CPU, in fp32."""
    return kernels.usable(weights) and weights.dtype == torch.float32


def move_by_adam(
    optimizer: FlatOptimizer, lists: Sequence[Sequence[Tensor]], learning_rate: Rate, decay: float
) -> None:
    """Moves tensors of an optimizer; the lists are weights, gradients, both averages, and numbers of steps.

    Our kernel moves averages and weights in one pass over memory, which also writes the rounded weights if there is a
    place. It needs a factor of gradients that the host knows.
    """
    weights, gradients, first, second, steps = map(list, lists)
    settings, scale = optimizer.settings, optimizer.scale
    if isinstance(scale, float) and all(map(moves_by_kernel, weights)):
        for weight, gradient, *averages, step in zip(*lists, strict=True):
            flats = (optimizer.rounded.get(id(weight), weight), weight, gradient.contiguous(), *averages)
            numbers = (*find_adam_factors(settings, float(step)), scale, 1.0 - learning_rate * decay, learning_rate)
            kernels.call("adamw", *flats, weight.numel(), *map(float, numbers))
        optimizer.written |= {*map(id, weights)} & optimizer.rounded.keys()
        return
    torch._fused_adamw_(
        weights,
        gradients,
        first,
        second,
        [],
        steps if settings.bias_correction else list(torch._foreach_add(steps, float(SETTLED))),
        lr=learning_rate,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        weight_decay=decay,
        eps=settings.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=find_divisor(scale, weights[0].device),
        found_inf=optimizer.found_inf,
    )


def find_divisor(scale: Tensor | float, device: torch.device) -> Tensor | None:
    """Returns the divisor of gradients that PyTorch's fused Adam takes in place of their factor."""
    if isinstance(scale, Tensor):
        return scale.reciprocal().float()
    return None if scale == 1.0 else torch.full((), 1 / scale, device=device)


def find_adam_factors(settings: OptimizerSettings, steps: float) -> tuple[float, ...]:
    """Computes the constants of Adam for our kernels: both betas, the bias corrections, and epsilon."""
    corrections = [1.0 - beta**steps if settings.bias_correction else 1.0 for beta in settings.betas]
    return (*settings.betas, *corrections, settings.epsilon)


STEPS = AdamW
