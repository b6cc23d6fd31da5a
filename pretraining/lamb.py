"""LAMB, exact under every ZeRO stage: each parameter has a trust ratio of its own, wherever it is cut.

The update of a parameter is Adam's with decay, times ‖weight‖ / ‖update‖: its trust ratio (You et al., 2020). ZeRO
hands an optimizer flat tensors that hold many parameters and parts of parameters; norms of those mean nothing. So
`Lamb` is told what they hold (partition.py), sums the squares of each parameter's parts, and adds up the sums of all
ranks in one small fp64 all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining import kernels, recipe
from pretraining.adamw import AdamW, adam
from pretraining.apex import find_apex, lamb_updates
from pretraining.partition import Share


@dataclass(frozen=True)
class Slot:
    """What has one trust ratio, as far as a flat tensor of this rank holds it: nothing, a part or all."""

    name: str
    size: int
    """elements on all ranks"""
    stretches: tuple[tuple[int, int], ...]
    """where: (offset, length)"""


@dataclass(frozen=True)
class Piece:
    """A stretch of a slot with its gradient and moments; all are views of flat tensors."""

    slot: int
    whole: bool
    """whether it is all of the slot"""
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
        self._slots: dict[int, tuple[tuple[Slot, ...], Any]] = {}
        self._ratios: dict[tuple[str, ...], Tensor] = {}

    def divide(self, shares: Sequence[Share], fused: Callable[[str], int]) -> None:
        """Says what the flat tensors hold; `fused` is how many parameters of the paper lie one after another in one."""
        for share in shares:
            slots = tuple(slot for name in share.sizes for slot in _slots(share, name, fused(name)))
            self._slots[id(share.tensor)] = (slots, share.group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            tensors = [each for each in group["params"] if each.grad is not None]
            if tensors:
                self._move(group, tensors)

    def _move(self, group: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """One step of tensors that are in the same place of their ranks: stage 3 brings them one at a time."""
        pieces, names, ranks = self._pieces(tensors)
        steps = 0.0
        for tensor in tensors:
            self.state[tensor]["step"] += 1
            steps = float(self.state[tensor]["step"])
        one_by_one = kernels.usable(tensors[0])
        move = self._move_one_by_one if one_by_one else self._move_together
        ratios = move(group, pieces, steps, len(names), ranks)
        if ratios is not None:
            self._ratios[names] = ratios

    def _move_one_by_one(
        self, group: dict[str, Any], pieces: Sequence[Piece], steps: float, slots: int, ranks: Any
    ) -> Tensor | None:
        """On a CPU: what is whole here moves at once, while it is still in the cache."""
        adapts = self._adapts(group)
        squares = torch.zeros(slots, 2, dtype=torch.float64)
        corrections = [1 - beta**steps if group["bias_correction"] else 1.0 for beta in group["betas"]]
        numbers = (*group["betas"], *corrections, group["eps"], float(group["weight_decay"]), float(self._scale()))
        limits = self._limits if adapts else (1.0, 1.0)
        cut = []
        for piece, row in zip(pieces, squares[[piece.slot for piece in pieces]], strict=True):
            tensors = (piece.weight, piece.gradient, piece.first, piece.second, row)
            at_once = piece.whole or not adapts
            move = -group["lr"] if at_once else 0.0
            kernels.call("lamb_update", *tensors, piece.weight.numel(), *numbers, move, *limits)
            squares[piece.slot] = row  # a slot has no more than one piece on a rank
            if not at_once:
                cut.append(piece)
        if not adapts:
            return None
        ratios = [self._trust_of(*row) for row in _joined(squares, ranks).tolist()]
        for piece in cut:
            piece.weight.add_(piece.gradient, alpha=-group["lr"] * ratios[piece.slot])
        return torch.tensor(ratios, dtype=torch.float64)

    def _move_together(
        self, group: dict[str, Any], pieces: Sequence[Piece], steps: float, slots: int, ranks: Any
    ) -> Tensor | None:
        """On a GPU: all pieces in each operation, and no ratio comes to the host."""
        squares = torch.zeros(slots, 2, dtype=torch.float64, device=group["params"][0].device)
        updates: list[Tensor] = []
        if pieces:
            updates, its_own = self._updates(group, pieces, steps)
            places = torch.tensor([piece.slot for piece in pieces])
            squares.index_add_(0, places.to(squares.device, non_blocking=True), its_own)
        ratios = self._trust(_joined(squares, ranks)) if self._adapts(group) else None
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

    def _pieces(self, tensors: Sequence[Tensor]) -> tuple[list[Piece], tuple[str, ...], Any]:
        """This rank's pieces, the names of all slots, and the ranks that have the other pieces."""
        pieces: list[Piece] = []
        names: list[str] = []
        ranks = None
        for tensor in tensors:
            slots, ranks = self._slots[id(tensor)]
            state = self.state_of(tensor)
            assert tensor.grad is not None
            flats = [each.view(-1) for each in (tensor, tensor.grad, state["exp_avg"], state["exp_avg_sq"])]
            for number, slot in enumerate(slots, len(names)):
                for stretch in slot.stretches:
                    whole = stretch[1] == slot.size
                    pieces.append(Piece(number, whole, *(flat.narrow(0, *stretch) for flat in flats)))
            names += [slot.name for slot in slots]
        return pieces, tuple(names), ranks

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
        ratios = weight / update
        ratios = ratios.clamp(*self._limits)
        return torch.where((weight > 0) & (update > 0), ratios, 1.0)

    def trust_ratios(self) -> dict[str, float]:
        """Of the last step, by the names of parameters; the same on all ranks."""
        return {
            name: ratio
            for names, ratios in self._ratios.items()
            for name, ratio in zip(names, ratios.tolist(), strict=True)
        }


def _slots(share: Share, name: str, count: int) -> list[Slot]:
    """The slots of a parameter, which cut its rows into equal blocks."""
    size = share.sizes[name] // count
    slots = []
    for number in range(count):
        begin, end = number * size, (number + 1) * size
        stretches = []
        for part in share.parts:
            first, last = max(part.start, begin), min(part.start + part.length, end)
            if part.name == name and first < last:
                stretches.append((part.offset + first - part.start, last - first))
        slots.append(Slot(name if count == 1 else f"{name}[{number}]", size, tuple(stretches)))
    return slots


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
    adam(updates, gradients, first, second, counts, group, rate=1.0, decay=0.0)
    torch._foreach_neg_(updates)
    if group["weight_decay"]:
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
    return updates


def _squares(weights: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """(pieces, 2), in fp64."""
    norms = [torch._foreach_norm(list(each), 2, dtype=torch.float64) for each in (weights, updates)]
    return torch.stack([torch.stack(list(each)) for each in norms], dim=1).square()
