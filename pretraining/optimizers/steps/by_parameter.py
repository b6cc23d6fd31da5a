"""Moves parameters one by one, by the update that an optimizer declares; gathers whole ones from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining.optimizers.steps.flat import FlatOptimizer, FlatTensor, Slice, add_over_group
from pretraining.processes.group import find_device

WEIGHT, GRADIENT = "weight", "gradient"


class ByParameter(FlatOptimizer):
    """Moves parameters by the `update` of an optimizer's declaration.

    A matrix that one rank holds moves there. Matrices that ZeRO has cut are gathered on all ranks.
    """

    def prepare(
        self, flat_tensors: Sequence[FlatTensor], fused_parts: Callable[[str], int], shapes: Mapping[str, torch.Size]
    ) -> None:
        super().prepare(flat_tensors, fused_parts, shapes)
        self._cut = (
            {name: find_cut_parameters(flat) for name, flat in self.flats.items()} if self.kind.whole_matrices else {}
        )

    def move(self, tensors: Sequence[Tensor], learning_rate: float, decay: float) -> None:
        for tensor in tensors:
            self._move_one(self.flats[id(tensor)], learning_rate, decay)

    def _move_one(self, flat: FlatTensor, learning_rate: float, decay: float) -> None:
        """Moves the parameters of a flat tensor; all ranks of its group go through them in the same order."""
        gradients = flat.tensor.grad
        assert gradients is not None
        gradients.mul_(self.scale)
        [step], found_inf = self.count_step([flat.tensor]), self.found_inf()
        state = self.get_state(flat.tensor)
        sources = {WEIGHT: flat.tensor, GRADIENT: gradients, **{name: state[name] for name in self.kind.state}}
        for name in flat.sizes:
            parts = [part for part in flat.parts if part.name == name]
            for values in self._values(flat, name, parts, sources):
                gradient = values.pop(GRADIENT)
                before = {kind: value.clone() for kind, value in values.items() if found_inf is not None}
                averages = {kind: value for kind, value in values.items() if kind != WEIGHT}
                change = self.kind.update(name, values[WEIGHT], gradient, averages, step.double(), self.settings)
                values[WEIGHT].mul_(1 - learning_rate * decay).sub_(change, alpha=learning_rate)
                if found_inf is not None:
                    for kind, value in before.items():
                        values[kind].copy_(torch.where(found_inf > 0, value, values[kind]))

    def _values(
        self, flat: FlatTensor, name: str, parts: list[Slice], sources: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Yields weight, gradient and state of a parameter, and writes changes back: this rank's stretches, or whole
        matrices, one for each part of a fused parameter."""
        if not self.kind.whole_matrices:
            for part in parts:
                yield {kind: flat.view_part(part, source) for kind, source in sources.items()}
            return
        cut = name in self._cut[id(flat.tensor)]
        if not cut and not parts:
            return  # another rank holds it
        shape = self.shapes[name]
        whole = {
            kind: gather_parameter(flat, parts, source, shape) if cut else flat.view_part(parts[0], source).view(shape)
            for kind, source in sources.items()
        }
        blocks = {kind: values.chunk(self.fused_parts(name)) for kind, values in whole.items()}
        for number in range(self.fused_parts(name)):
            yield {kind: values[number] for kind, values in blocks.items()}
        for kind, source in sources.items() if cut else ():
            for part in parts:
                flat.view_part(part, source).copy_(whole[kind].view(-1)[part.start : part.start + part.length])


def find_cut_parameters(flat: FlatTensor) -> set[str]:
    """Finds the parameters of a flat tensor that no rank holds whole; all ranks of its group call it."""
    held = {part.name: part.length for part in flat.parts}
    longest = torch.tensor([held.get(name, 0) for name in flat.sizes])
    if flat.group is not None:
        longest = longest.to(find_device(flat.group))
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=flat.group)
    return {name for (name, size), length in zip(flat.sizes.items(), longest.tolist(), strict=True) if length < size}


def gather_parameter(flat: FlatTensor, parts: Sequence[Slice], source: Tensor, shape: torch.Size) -> Tensor:
    """Gathers a parameter, its gradient or its state from the parts of all ranks, which all call it."""
    whole = torch.zeros(shape, dtype=source.dtype, device=source.device)
    for part in parts:
        whole.view(-1)[part.start : part.start + part.length] = flat.view_part(part, source)
    return add_over_group(whole, flat.group)  # exact: all ranks but one add zeros
