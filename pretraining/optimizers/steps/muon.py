"""Steps of Muon: matrices of one shape move together, and all other weights by Adam."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretraining.optimizers.muon import MOMENTUM, MuonSettings, orthogonalize, scale_update
from pretraining.optimizers.steps.adamw import move_by_adam
from pretraining.optimizers.steps.flat import GRADIENT, WEIGHT, ByParameter, Rate

STACK = {"cuda": 1 << 24, "cpu": 1 << 21}
"""The elements of matrices that move together, by the type of device: they take six times their memory. With
`parallel.same_bits` each moves alone, since the bits of a product may depend on how many are made together."""


class Muon(ByParameter):
    """Muon on flat tensors. A step overwrites the gradients."""

    def move(self, tensors: Sequence[Tensor], learning_rate: Rate, decay: float) -> None:
        steps, stacks, others = self.count_step(tensors), defaultdict[torch.Size, list[Mapping[str, Tensor]]](list), []
        finite = self.scale.isfinite() if isinstance(self.scale, Tensor) else None
        factor = choose_numbers(finite, 1 - learning_rate * decay, 1.0)
        for tensor, step in zip(tensors, steps, strict=True):
            flat, sources = self.flats[id(tensor)], self.find_sources(tensor)
            for name in flat.sizes:
                parts = self.parts[id(tensor)].get(name, [])
                if self.roles[name].kind != "matrix":
                    others += [(*(flat.view_part(part, source) for source in sources.values()), step) for part in parts]
                    continue
                stays = name not in self.cut[id(tensor)] and name not in self.shares
                for values in self.find_values(flat, name, parts, sources):
                    if stays:
                        stacks[values[WEIGHT].shape].append(values)
                    else:  # what is gathered goes again at once
                        self._move_matrices([values], finite, factor, learning_rate)
        for shape, matrices in stacks.items():
            most = 1 if self.same_bits else max(1, STACK[tensors[0].device.type] // shape.numel())
            for begin in range(0, len(matrices), most):
                self._move_matrices(matrices[begin : begin + most], finite, factor, learning_rate)
        if others:
            move_by_adam(self, [*zip(*others, strict=True)], learning_rate, decay)

    def _move_matrices(
        self, matrices: Sequence[Mapping[str, Tensor]], finite: Tensor | None, factor: Rate, learning_rate: Rate
    ) -> None:
        """Moves matrices of one shape, which decay by a factor; nothing moves if gradients are not `finite`. None says
        that the host has checked them."""
        names = WEIGHT, GRADIENT, *self.kind.state
        weights, gradients, momenta, squares = ([each[name] for each in matrices] for name in names)
        gradient, momentum = torch.stack(gradients).mul_(self.scale), torch.stack(momenta)
        momentum.lerp_(choose_numbers(finite, gradient, momentum), 1 - MOMENTUM)
        torch._foreach_copy_(momenta, momentum.unbind())
        with self.rounding(gradient.device):
            change = orthogonalize(gradient.lerp_(momentum, MOMENTUM))
        assert isinstance(self.settings, MuonSettings)
        columns = [each[:, :1] for each in squares] if self.settings.even_rows else []
        usual = torch.stack(columns) if columns else None
        change = scale_update(change, usual).contiguous().mul_(-learning_rate)
        if usual is not None:
            torch._foreach_copy_(columns, choose_numbers(finite, usual, torch.stack(columns)).unbind())
        torch._foreach_mul_(weights, factor)
        torch._foreach_add_(weights, choose_numbers(finite, change, 0.0).unbind())


def choose_numbers(finite: Tensor | None, new: Any, old: Any) -> Any:
    """Returns the new numbers, or the old ones if gradients are not finite. None says that the host has checked."""
    return new if finite is None else torch.where(finite, new, old)


STEPS = Muon
