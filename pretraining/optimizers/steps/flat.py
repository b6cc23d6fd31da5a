"""What an engine trains with: an optimizer on flat fp32 tensors that hold many parameters, and parts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining.optimizers.declaration import Optimizer, OptimizerSettings
from pretraining.processes.group import device_of


@dataclass(frozen=True)
class Slice:
    """What a flat tensor holds of a parameter: a part of it, or all."""

    name: str
    """name of the parameter"""
    start: int
    """the part's first element in the flattened parameter"""
    length: int
    offset: int
    """the part's first element in the flat tensor"""


@dataclass(frozen=True)
class FlatTensor:
    """A flat fp32 tensor that this rank's optimizer moves, and the parts that it holds; what is no part is padding."""

    tensor: Tensor
    sizes: dict[str, int]
    """how many elements of a parameter the tensors of all ranks hold together, also where this one has no part of it"""
    parts: tuple[Slice, ...]
    group: Any = None
    """process group of the ranks that hold the rest; None where this rank holds all"""

    def view_part(self, part: Slice, flat: Tensor) -> Tensor:
        """Views a part in a tensor that is laid out as `tensor` is, such as an average or a gradient."""
        return flat.view(-1).narrow(0, part.offset, part.length)


def add_over_group(own: Tensor, group: Any) -> Tensor:
    """Adds up a tensor over the ranks of a group, which all call it; None is a group of this rank alone."""
    if group is None or dist.get_world_size(group) == 1:
        return own
    total = own.to(device_of(group))
    dist.all_reduce(total, group=group)
    return total.to(own.device)


class FlatOptimizer(torch.optim.Optimizer):
    """An optimizer that knows what DeepSpeed's flat tensors hold. `prepare` comes before the first step."""

    keeps_zeros: ClassVar[bool] = False
    """whether a step leaves gradients 0 that are 0; other steps may write anything over them"""

    def __init__(self, kind: Optimizer, groups: Sequence[dict[str, Any]], settings: OptimizerSettings):
        assert not {"weight", "gradient", "step"} & {*kind.state}, f"{kind.state}: names that something else has"
        super().__init__(groups, {"lr": 0.0, "weight_decay": settings.weight_decay})
        self.kind, self.settings = kind, settings
        self.flats: dict[int, FlatTensor] = {}
        """what a flat tensor holds, found by its id"""
        self.gradient_norm: Callable[[], Tensor | float | None] = lambda: None
        """the norm over all weights and ranks, which a step may ask for"""
        self.scale: Tensor | float = 1.0
        """what gradients are multiplied with in a step; NaN on a device where they are not finite, and nothing moves"""
        self.rounded: dict[int, Tensor] = {}
        """where a step may write what the weights of a flat tensor become, in the type that the model has, by its id"""
        self.written: set[int] = set()
        """the ids of those of which the last step has written it, so that nobody need copy them"""

    def prepare(
        self, flat_tensors: Sequence[FlatTensor], fused_parts: Callable[[str], int], shapes: Mapping[str, torch.Size]
    ) -> None:
        """Is told before the first step what DeepSpeed's flat tensors hold, and which shapes parameters have.

        `fused_parts` says how many parameters of the paper lie one after another in one of ours.
        """
        self.flats = {id(flat.tensor): flat for flat in flat_tensors}
        self.fused_parts, self.shapes = fused_parts, shapes

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        self.written.clear()
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if tensors:
                self.move(tensors, group["lr"], group["weight_decay"])

    def move(self, tensors: Sequence[Tensor], learning_rate: float, decay: float) -> None:
        """Makes one step of tensors that have the same place on every rank: stage 3 brings them one at a time."""
        raise NotImplementedError

    def found_inf(self) -> Tensor | None:
        """(), on the device: 1 where gradients are not finite, and 0 otherwise; None where the host has looked."""
        return self.scale.isfinite().logical_not().float() if isinstance(self.scale, Tensor) else None

    def count_step(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Adds this step to the number of those that have moved each tensor, and returns these numbers."""
        steps, found_inf = [self.get_state(tensor)["step"] for tensor in tensors], self.found_inf()
        torch._foreach_add_(steps, 1.0)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        return steps

    def histograms(self) -> dict[str, dict[str, list[float]]]:
        """What the last step has to show as distributions: by name, then by part of the model."""
        return {}

    def get_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Gives the state of a tensor, and the number of steps that have moved it; zeros at first."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in self.kind.state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
