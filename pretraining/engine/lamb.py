"""LAMB, exact under every ZeRO stage: each parameter has a trust ratio of its own, wherever it is cut.

The update of a parameter is Adam's with decay, times ‖weight‖ / ‖update‖: its trust ratio (You et al., 2020). ZeRO
hands an optimizer flat tensors that hold many parameters and parts of parameters; norms of those mean nothing. So
`Lamb` is told what they hold (partition.py), sums the squares of each parameter's parts, and adds up the sums of all
ranks in one small fp64 all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining.config import settings as recipe
from pretraining.engine.adamw import AdamW, adam
from pretraining.engine.apex import find_apex, lamb_updates
from pretraining.engine.partition import FlatTensor
from pretraining.model import cpu_kernels as kernels


@dataclass(frozen=True)
class Layout:
    """Which slots a flat tensor holds on all ranks, and what of them on this one. A slot has one trust ratio: it is a
    parameter, or one of those that lie one after another in a fused one."""

    slots: tuple[str, ...]
    """their names"""
    places: tuple[int, ...]
    """the slot of each stretch of this rank; no slot has two"""
    stretches: Tensor
    """(stretches, 3) int64: offset, length, whether it is all of its slot"""
    ranks: Any
    """those that hold the rest, if any"""

    def by_slot(self, squares: Tensor) -> Tensor:
        """(slots, 2) from (stretches, 2)."""
        found = torch.zeros(len(self.slots), 2, dtype=squares.dtype)
        found[list(self.places)] = squares
        return found


@dataclass(frozen=True)
class Piece:
    """A stretch of a slot with its gradient and moments; all are views of flat tensors."""

    slot: int
    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


class Lamb(AdamW):
    """`divide` comes before the first step. The gradients are overwritten."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: recipe.Optimizer):
        super().__init__(groups, settings)
        self.settings = settings
        self.gradient_norm: Callable[[], Tensor | float | None] = lambda: None
        """over all weights and ranks, where the settings want it divided out"""
        self._layouts: dict[int, Layout] = {}
        self._ratios: dict[tuple[str, ...], Tensor] = {}

    def divide(self, shares: Sequence[FlatTensor], fused: Callable[[str], int]) -> None:
        """Says what the flat tensors hold; `fused` is how many parameters of the paper lie one after another in one."""
        for share in shares:
            self._layouts[id(share.tensor)] = make_layout(share, fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            tensors = [each for each in group["params"] if each.grad is not None]
            if tensors:
                self._move(group, tensors)

    def _move(self, group: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """One step of tensors that are in the same place of their ranks: stage 3 brings them one at a time."""
        for tensor in tensors:
            self.state_of(tensor)["step"] += 1
        steps = float(self.state_of(tensors[0])["step"])
        layouts = [self._layouts[id(tensor)] for tensor in tensors]
        move = self._move_one_by_one if kernels.usable(tensors[0]) else self._move_together
        ratios = move(group, tensors, layouts, steps)
        if ratios is not None:
            self._ratios[_names(layouts)] = ratios

    def _move_one_by_one(
        self, group: dict[str, Any], tensors: Sequence[Tensor], layouts: Sequence[Layout], steps: float
    ) -> Tensor | None:
        """On a CPU: what is whole here moves at once, while it is still in the cache."""
        adapts = self._adapts(group)
        corrections = [1 - beta**steps if group["bias_correction"] else 1.0 for beta in group["betas"]]
        numbers = (*group["betas"], *corrections, group["eps"], float(group["weight_decay"]), float(self._scale()))
        limits = self._limits if adapts else (1.0, 1.0)
        found = []
        for tensor, layout in zip(tensors, layouts, strict=True):
            state, squares = self.state_of(tensor), torch.zeros(len(layout.stretches), 2, dtype=torch.float64)
            flats = (tensor, tensor.grad, state["exp_avg"], state["exp_avg_sq"], squares, layout.stretches)
            count = len(layout.stretches)
            kernels.call("lamb_update", *flats, count, *numbers, -group["lr"], *limits, int(not adapts))
            found.append(layout.by_slot(squares))
        if not adapts:
            return None
        ratios = [self._trust_of(*row) for row in _joined(torch.cat(found), layouts[0].ranks).tolist()]
        begin = 0
        for tensor, layout in zip(tensors, layouts, strict=True):
            for slot, (offset, length, whole) in zip(layout.places, layout.stretches.tolist(), strict=True):
                if not whole:
                    assert tensor.grad is not None
                    weight, update = (each.view(-1).narrow(0, offset, length) for each in (tensor, tensor.grad))
                    weight.add_(update, alpha=-group["lr"] * ratios[begin + slot])
            begin += len(layout.slots)
        return torch.tensor(ratios, dtype=torch.float64)

    def _move_together(
        self, group: dict[str, Any], tensors: Sequence[Tensor], layouts: Sequence[Layout], steps: float
    ) -> Tensor | None:
        """On a GPU: all pieces in each operation, and no ratio comes to the host."""
        pieces = list(self._pieces(tensors, layouts))
        slots = sum(len(layout.slots) for layout in layouts)
        squares = torch.zeros(slots, 2, dtype=torch.float64, device=tensors[0].device)
        updates: list[Tensor] = []
        if pieces:
            updates, its_own = self._updates(group, pieces, steps)
            places = torch.tensor([piece.slot for piece in pieces])
            squares.index_add_(0, places.to(squares.device, non_blocking=True), its_own)
        ratios = self._trust(_joined(squares, layouts[0].ranks)) if self._adapts(group) else None
        if ratios is not None:
            factors = ratios.float()
            torch._foreach_mul_(updates, [factors[piece.slot] for piece in pieces])
        if pieces:
            torch._foreach_add_([piece.weight for piece in pieces], updates, alpha=-group["lr"])
        return ratios

    @property
    def _limits(self) -> tuple[float, float]:
        return self.settings.trust_limits or (0.0, math.inf)

    def _adapts(self, group: dict[str, Any]) -> bool:
        return bool(group["weight_decay"]) or self.settings.trust_all

    def _scale(self) -> Tensor | float:
        """What gradients are multiplied with."""
        if not self.settings.normalize:
            return 1.0
        norm = self.gradient_norm()
        assert norm is not None
        return 1.0 / (norm + torch.finfo(torch.float32).tiny)

    def _pieces(self, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> Iterator[Piece]:
        """This rank's pieces."""
        begin = 0
        for tensor, layout in zip(tensors, layouts, strict=True):
            state = self.state_of(tensor)
            assert tensor.grad is not None
            flats = [each.view(-1) for each in (tensor, tensor.grad, state["exp_avg"], state["exp_avg_sq"])]
            for slot, (offset, length, _) in zip(layout.places, layout.stretches.tolist(), strict=True):
                yield Piece(begin + slot, *(flat.narrow(0, offset, length) for flat in flats))
            begin += len(layout.slots)

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = super().state_of(parameter)
        state["step"] = state["step"].cpu()  # where it is read without waiting for a GPU
        return state

    def _updates(self, group: dict[str, Any], pieces: Sequence[Piece], steps: float) -> tuple[list[Tensor], Tensor]:
        """Moves the moments. The updates with decay, and for each the squares of its piece's weight and of itself."""
        if self.settings.normalize:
            torch._foreach_mul_([piece.gradient for piece in pieces], self._scale())
        if (amp_c := find_apex(self.settings.kernels, pieces[0].weight.device)) is not None:
            return lamb_updates(
                amp_c,
                list(zip(*((each.weight, each.gradient, each.first, each.second) for each in pieces), strict=True)),
                decay=group["weight_decay"],
                steps=steps,
                betas=group["betas"],
                epsilon=group["eps"],
                corrected=group["bias_correction"],
            )
        updates = _torch_updates(group, pieces, steps)
        return updates, _squares([piece.weight for piece in pieces], updates)

    def _trust_of(self, weight: float, update: float) -> float:
        """The ratio from the squares of both: 1 where one is 0."""
        low, high = self._limits
        return min(max(math.sqrt(weight / update), low), high) if weight > 0 and update > 0 else 1.0

    def _trust(self, squares: Tensor) -> Tensor:
        """The same for (slots, 2) of them."""
        weight, update = squares.sqrt().unbind(1)
        ratios = (weight / update).clamp(*self._limits)
        return torch.where((weight > 0) & (update > 0), ratios, 1.0)

    def trust_ratios(self) -> dict[str, float]:
        """Of the last step, by the names of parameters; the same on all ranks."""
        return {
            name: ratio
            for names, ratios in self._ratios.items()
            for name, ratio in zip(names, ratios.tolist(), strict=True)
        }


def make_layout(share: FlatTensor, fused: Callable[[str], int]) -> Layout:
    """What a share holds, slot by slot: a fused parameter's rows make equal blocks."""
    slots: list[str] = []
    places, stretches = [], []
    for name, size in share.sizes.items():
        count = fused(name)
        block = size // count
        for number in range(count):
            begin, end = number * block, (number + 1) * block
            for part in share.parts:
                first, last = max(part.start, begin), min(part.start + part.length, end)
                if part.name == name and first < last:
                    places.append(len(slots))
                    stretches.append((part.offset + first - part.start, last - first, int(last - first == block)))
            slots.append(name if count == 1 else f"{name}[{number}]")
    table = torch.tensor(stretches, dtype=torch.int64).view(-1, 3)
    return Layout(tuple(slots), tuple(places), table, share.group)


def _names(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(name for layout in layouts for name in layout.slots)


def _joined(squares: Tensor, ranks: Any) -> Tensor:
    """The sums over all ranks; all of them call it."""
    if ranks is not None and dist.get_world_size(ranks) > 1:
        dist.all_reduce(squares, group=ranks)
    return squares


def _torch_updates(group: dict[str, Any], pieces: Sequence[Piece], steps: float) -> list[Tensor]:
    """With PyTorch's fused Adam, which moves zeros by -1 times its update."""
    weights, gradients = [piece.weight for piece in pieces], [piece.gradient for piece in pieces]
    updates = [torch.zeros_like(each) for each in weights]
    counts = [torch.full((), steps, device=each.device) for each in weights]
    first, second = [piece.first for piece in pieces], [piece.second for piece in pieces]
    adam(updates, gradients, first, second, counts, group, learning_rate=1.0, decay=0.0)
    torch._foreach_neg_(updates)
    if group["weight_decay"]:
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
    return updates


def _squares(weights: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """(pieces, 2), in fp64."""
    norms = [torch._foreach_norm(list(each), 2, dtype=torch.float64) for each in (weights, updates)]
    return torch.stack([torch.stack(list(each)) for each in norms], dim=1).square()
