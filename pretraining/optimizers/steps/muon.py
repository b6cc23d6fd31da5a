"""Steps of Muon: on a GPU, matrices of one shape move together, and all other weights by one call of PyTorch's Adam."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pretraining.optimizers.muon import MOMENTUM, MuonSettings, orthogonalize, scale_update
from pretraining.optimizers.steps.adamw import move_by_pytorch
from pretraining.optimizers.steps.flat import GRADIENT, WEIGHT, ByParameter, Rate

STACK = 1 << 24
"""The elements of matrices that move together: they take six times their memory, and larger products are no faster."""


class Muon(ByParameter):
    """Muon on flat tensors. A step overwrites the gradients."""

    def move(self, tensors: Sequence[Tensor], learning_rate: Rate, decay: float) -> None:
        if isinstance(learning_rate, float):  # a processor has few of them in its caches, and waits for no launches
            super().move(tensors, learning_rate, decay)
            return
        steps, stacks, others = self.count_step(tensors), defaultdict[torch.Size, list[Mapping[str, Tensor]]](list), []
        held, scale = [self.find_sources(tensor) for tensor in tensors], self.scale_on(tensors[0].device)
        torch._foreach_mul_([sources[GRADIENT] for sources in held], scale)
        finite = scale.isfinite()
        numbers = finite, torch.where(finite, 1 - learning_rate * decay, 1.0), learning_rate
        for tensor, sources, step in zip(tensors, held, steps, strict=True):
            flat = self.flats[id(tensor)]
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
                        self._move_matrices([values], *numbers)
        for shape, matrices in stacks.items():
            most = max(1, STACK // shape.numel())
            for begin in range(0, len(matrices), most):
                self._move_matrices(matrices[begin : begin + most], *numbers)
        if others:
            move_by_pytorch([*zip(*others, strict=True)], learning_rate, decay, self.settings, self.found_inf)

    def _move_matrices(
        self, matrices: Sequence[Mapping[str, Tensor]], finite: Tensor, factor: Tensor, learning_rate: Tensor
    ) -> None:
        """Moves matrices of one shape, which decay by a factor; nothing moves if gradients are not `finite`."""
        names = WEIGHT, GRADIENT, *self.kind.state
        weights, gradients, momenta, squares = ([each[name] for each in matrices] for name in names)
        gradient, momentum = torch.stack(gradients), torch.stack(momenta)
        momentum.lerp_(torch.where(finite, gradient, momentum), 1 - MOMENTUM)
        torch._foreach_copy_(momenta, momentum.unbind())
        with self.rounding(learning_rate.device):
            change = orthogonalize(gradient.lerp(momentum, MOMENTUM))
        assert isinstance(self.settings, MuonSettings)
        columns = [each[:, :1] for each in squares] if self.settings.even_rows else []
        usual = torch.stack(columns) if columns else None
        change = scale_update(change, usual).contiguous().mul_(-learning_rate)
        if usual is not None:
            torch._foreach_copy_(columns, torch.where(finite, usual, torch.stack(columns)).unbind())
        torch._foreach_mul_(weights, factor)
        torch._foreach_add_(weights, torch.where(finite, change, 0.0).unbind())


STEPS = Muon
