"""One step of Adam with decoupled decay: by a kernel of our own on a CPU, by PyTorch's fused one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        lists = tensors, gradients, first, second, steps
        if isinstance(self.scale, float) and all(map(moves_by_kernel, tensors)):
            move_by_kernel(lists, learning_rate, decay, self.settings, self.scale, self.rounded)
            self.written |= {*map(id, tensors)} & self.rounded.keys()
            return
        divisor = self._find_divisor(tensors[0].device)
        move_by_pytorch(lists, learning_rate, decay, self.settings, self.found_inf, divisor)

    def _find_divisor(self, device: torch.device) -> Tensor | None:
        """Returns the divisor of gradients that PyTorch's fused Adam takes."""
        if isinstance(self.scale, Tensor):
            return self.scale.reciprocal().float()
        return None if self.scale == 1.0 else torch.full((), 1 / self.scale, device=device)


def moves_by_kernel(weights: Tensor) -> bool:
    """Whether our kernel can move these weights: on a CPU, in fp32."""
    return kernels.usable(weights) and weights.dtype == torch.float32


def move_by_kernel(
    lists: Sequence[Sequence[Tensor]],
    learning_rate: Rate,
    decay: float,
    settings: OptimizerSettings,
    scale: float = 1.0,
    rounded: Mapping[int, Tensor] = {},
) -> None:
    """Moves tensors in one pass over memory. One whose id is in `rounded` is also written there, in that type. The
    lists are weights, gradients to multiply by `scale`, both averages, and numbers of steps."""
    for weights, gradients, first, second, step in zip(*lists, strict=True):
        flats = (rounded.get(id(weights), weights), weights, gradients.contiguous(), first, second)
        numbers = (*find_adam_factors(settings, float(step)), scale, 1.0 - learning_rate * decay, learning_rate)
        kernels.call("adamw", *flats, weights.numel(), *map(float, numbers))


def move_by_pytorch(
    lists: Sequence[Sequence[Tensor]],
    learning_rate: Rate,
    decay: float,
    settings: OptimizerSettings,
    found_inf: Tensor | None,
    divisor: Tensor | None = None,
) -> None:
    """Moves tensors by PyTorch's fused Adam; the lists are weights, gradients, both averages, and numbers of steps."""
    weights, gradients, first, second, steps = map(list, lists)
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
        grad_scale=divisor,
        found_inf=found_inf,
    )


def find_adam_factors(settings: OptimizerSettings, steps: float) -> tuple[float, ...]:
    """Computes the constants of Adam for our kernels: both betas, the bias corrections, and epsilon."""
    corrections = [1.0 - beta**steps if settings.bias_correction else 1.0 for beta in settings.betas]
    return (*settings.betas, *corrections, settings.epsilon)


STEPS = AdamW
