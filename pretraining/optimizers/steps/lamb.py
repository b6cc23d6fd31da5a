"""LAMB, exact under every ZeRO stage: each parameter has a trust ratio of its own, wherever it is cut.

The update of a parameter is Adam's with decay, times ‖weight‖ / ‖update‖: its trust ratio (You et al., 2020). ZeRO
gives an optimizer flat tensors of many parameters and parts of parameters, whose norms mean nothing. So `Lamb` adds up
the squares of each parameter's parts, and the sums of all ranks in one small fp64 all-reduce.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretraining.mesh.mesh import Shares
from pretraining.model import cpu_kernels as kernels
from pretraining.model import gpu_operations as gpu
from pretraining.model.gpu_tiles import Chunks
from pretraining.model.shape import Role
from pretraining.optimizers.declaration import Optimizer, OptimizerSettings
from pretraining.optimizers.steps.adamw import SETTLED, adam, find_adam_factors
from pretraining.optimizers.steps.flat import WHOLE, FlatOptimizer, FlatTensor, add_over_group


class SlotTable(NamedTuple):
    """The slots of a flat tensor on all ranks, and the stretches of them on this rank.

    A slot has one trust ratio: it is a parameter, or one of the parameters that are joined in a fused one.
    """

    slots: tuple[str, ...]
    """the names of the slots"""
    places: tuple[int, ...]
    """the slot of every stretch of this rank; no slot has two stretches"""
    stretches: Tensor
    """(stretches, 3) int64: offset, length, whether it is a whole slot"""
    group: Any
    """the process group of the ranks that hold the rest; None for this rank alone"""
    divided: tuple[int, ...] = ()
    """the slots of which the ranks of a tensor group hold a share each"""

    def spread_over_slots(self, squares: Tensor) -> Tensor:
        """Spreads squares of this rank's stretches, (stretches, 2), over the slots, (slots, 2)."""
        found = torch.zeros(len(self.slots), 2, dtype=squares.dtype)
        found[list(self.places)] = squares
        return found


class Lamb(FlatOptimizer):
    """LAMB on flat tensors. A step overwrites the gradients."""

    def __init__(self, kind: Optimizer, groups: Sequence[dict[str, Any]], settings: OptimizerSettings):
        super().__init__(kind, groups, settings)
        self._amp_c = load_apex()
        self._tables: dict[int, SlotTable] = {}
        """slot tables by the id of their flat tensor"""
        self._chunks: dict[int, Chunks] = {}
        self.squares: dict[tuple[str, ...], Tensor] = {}
        """the squares of weights and updates of the last step, (slots, 2), by the names of their slots; the same on all
        ranks"""

    def read_layout(self) -> None:
        self._chunks.clear()
        self._tables = {name: make_slot_table(flat, self.roles, self.shares) for name, flat in self.flats.items()}

    def move(self, tensors: Sequence[Tensor], learning_rate: float, decay: float) -> None:
        by_triton = gpu.usable("optimizer", tensors[0])
        looks = kernels.usable(tensors[0]) or (self._amp_c is not None and not by_triton)
        if looks and (found_inf := self.found_inf()) is not None and bool(found_inf):
            return  # only PyTorch's kernels skip a step by themselves; with apex, the host waits for the GPU here
        steps = self.count_step(tensors)[0]
        tables = [self._tables[id(tensor)] for tensor in tensors]
        together = self._move_by_triton if by_triton else self._move_together
        move = self._move_one_by_one if kernels.usable(tensors[0]) else together
        squares = move(tensors, tables, steps, learning_rate, decay)
        if self.decays:
            self.squares[tuple(name for table in tables for name in table.slots)] = squares

    def _move_one_by_one(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable], steps: Tensor, learning_rate: float, decay: float
    ) -> Tensor:
        """Moves tensors on a CPU: a slot that is whole here moves at once, while it is cached."""
        numbers = (*find_adam_factors(self.settings, float(steps)), float(decay), float(self.scale))
        found = []
        for tensor, table in zip(tensors, tables, strict=True):
            state, squares = self.get_state(tensor), torch.zeros(len(table.stretches), 2, dtype=torch.float64)
            flats = (tensor, tensor.grad, state["exp_avg"], state["exp_avg_sq"], squares, table.stretches)
            count = len(table.stretches)
            kernels.call("lamb_update", *flats, count, *numbers, -learning_rate, int(self.decays))
            found.append(table.spread_over_slots(squares))
        total = torch.cat(found)
        if not self.decays:
            return total
        total, begin = self._add_over_ranks(total, tables), 0
        ratios = find_ratios(total).tolist()
        for tensor, table in zip(tensors, tables, strict=True):
            for slot, (offset, length, whole) in zip(table.places, table.stretches.tolist(), strict=True):
                if not whole:
                    assert tensor.grad is not None
                    weight, update = (flat.view(-1).narrow(0, offset, length) for flat in (tensor, tensor.grad))
                    weight.add_(update, alpha=-learning_rate * ratios[begin + slot])
            begin += len(table.slots)
        return total

    def _move_by_triton(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable], steps: Tensor, learning_rate: float, decay: float
    ) -> Tensor:
        """Moves tensors on a GPU by kernels of our own, in a few launches; the host waits for nothing."""
        settings, device = self.settings, tensors[0].device
        for tensor, table in zip(tensors, tables, strict=True):
            if id(tensor) not in self._chunks:
                cut = Chunks.from_stretches(table.stretches.tolist(), table.places, len(table.slots), device)
                self._chunks[id(tensor)] = cut
        scale = self.scale if isinstance(self.scale, Tensor) else torch.full((), self.scale, device=device)
        rate = torch.full((), learning_rate, device=device)
        factors = (settings.betas, settings.epsilon, decay, settings.bias_correction, steps, scale.float(), rate)
        flats: list[Any] = [[each, each.grad, *map(self.get_state(each).get, self.kind.state)] for each in tensors]
        add = partial(self._add_over_ranks, tables=tables)
        chunks = [self._chunks[id(tensor)] for tensor in tensors]
        return gpu.make_lamb_step(flats, chunks, factors, add, self.decays)

    def _move_together(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable], steps: Tensor, learning_rate: float, decay: float
    ) -> Tensor:
        """Moves tensors on a GPU: each operation takes all stretches, and ratios stay on the device."""
        places, lists = self._view_stretches(tensors, tables)
        slots = sum(len(table.slots) for table in tables)
        squares = torch.zeros(slots, 2, dtype=torch.float64, device=tensors[0].device)
        updates: list[Tensor] = []
        if places:
            updates, own_squares = self._compute_updates(lists, steps, decay)
            squares.index_add_(0, torch.tensor(places).to(squares.device, non_blocking=True), own_squares)
        if self.decays:
            squares = self._add_over_ranks(squares, tables)
        if updates and self.decays:
            factors, found_inf = find_ratios(squares).float(), self.found_inf()
            if found_inf is not None:
                factors = factors * (1.0 - found_inf)  # then the updates are the decay alone
            torch._foreach_mul_(updates, [factors[place] for place in places])
        if updates:
            torch._foreach_add_(lists[0], updates, alpha=-learning_rate)
        return squares

    def _add_over_ranks(self, squares: Tensor, tables: Sequence[SlotTable]) -> Tensor:
        """Adds up the squares of slots, (slots, 2), over the ranks that hold parts of them."""
        total = add_over_group(squares, tables[0].group)
        begins = itertools.accumulate((len(table.slots) for table in tables), initial=0)
        divided = [begin + slot for begin, table in zip(begins, tables, strict=False) for slot in table.divided]
        if divided:
            total[divided] = add_over_group(total[divided], self.shares.mesh.tensor_group)
        return total

    def _view_stretches(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable]
    ) -> tuple[list[int], list[list[Tensor]]]:
        """Returns the slots of this rank's stretches, and views of their weights, gradients, and both averages."""
        begin, places = 0, []
        lists: list[list[Tensor]] = [[], [], [], []]
        for tensor, table in zip(tensors, tables, strict=True):
            state = self.get_state(tensor)
            assert tensor.grad is not None
            flats = (tensor, tensor.grad, state["exp_avg"], state["exp_avg_sq"])
            for views, flat in zip(lists, flats, strict=True):
                views += [flat.view(-1).narrow(0, offset, length) for offset, length, _ in table.stretches.tolist()]
            places += [begin + place for place in table.places]
            begin += len(table.slots)
        return places, lists

    def _compute_updates(self, lists: list[list[Tensor]], steps: Tensor, decay: float) -> tuple[list[Tensor], Tensor]:
        """Moves the averages; returns the updates with decay, and the squares of weight and update of every stretch."""
        weights, gradients, *_ = lists
        if self._amp_c is not None and weights[0].is_cuda:
            torch._foreach_mul_(gradients, self.scale)
            return compute_by_apex(self._amp_c, lists, self.settings, float(steps), decay)
        updates = self._compute_by_torch(lists, steps, decay)
        return updates, _square_norms(weights, updates)

    def _compute_by_torch(self, lists: list[list[Tensor]], steps: Tensor, decay: float) -> list[Tensor]:
        """Computes updates by PyTorch's fused Adam, which moves zeros by minus the update."""
        weights = lists[0]
        updates = [torch.zeros_like(weight) for weight in weights]
        counts = list(steps.repeat(len(weights)).unbind())
        adam([updates, *lists[1:]], counts, self.settings, 1.0, 0.0, self.scale, self.found_inf())
        torch._foreach_neg_(updates)
        if decay:
            torch._foreach_add_(updates, weights, alpha=decay)
        return updates


def find_ratios(squares: Tensor) -> Tensor:
    """Computes trust ratios from the squares of weights and updates, (slots, 2): 1 where one of them is 0."""
    weight, update = squares.unbind(1)
    return torch.where((weight > 0) & (update > 0), (weight / update).sqrt(), 1.0)


def make_slot_table(flat: FlatTensor, roles: Mapping[str, Role], shares: Shares = WHOLE) -> SlotTable:
    """Lists the slots of a flat tensor: a fused parameter is divided into equal blocks of rows, a slot for each."""
    slots: list[str] = []
    divided: list[int] = []
    places, stretches = [], []
    for name, size in flat.sizes.items():
        count = roles[name].parts
        block = size // count
        for number in range(count):
            begin, end = number * block, (number + 1) * block
            for part in flat.parts:
                first, last = max(part.start, begin), min(part.start + part.length, end)
                if part.name == name and first < last:
                    places.append(len(slots))
                    is_whole = last - first == block and name not in shares
                    stretches.append((part.offset + first - part.start, last - first, int(is_whole)))
            divided += [len(slots)] if name in shares else []
            slots.append(name if count == 1 else f"{name}[{number}]")
    table = torch.tensor(stretches, dtype=torch.int64).view(-1, 3)
    return SlotTable(tuple(slots), tuple(places), table, flat.group, tuple(divided))


def _square_norms(weights: Sequence[Tensor], updates: Sequence[Tensor]) -> Tensor:
    """Computes the squares of weights and updates, (stretches, 2), in fp64."""
    norms = [torch._foreach_norm(list(tensors), 2, dtype=torch.float64) for tensors in (weights, updates)]
    return torch.stack([torch.stack(list(column)) for column in norms], dim=1).square()


CHUNK = 2048 * 32
"""The elements of a block of the GPU, as in apex itself."""


def load_apex() -> Any:
    """Loads apex's module of kernels; None where it is missing. On PyPI the name apex is another project's."""
    try:
        return importlib.import_module("amp_C")
    except ImportError:
        return None


def compute_by_apex(
    amp_c: Any, lists: list[list[Tensor]], settings: OptimizerSettings, steps: float, decay: float
) -> tuple[list[Tensor], Tensor]:
    """Moves the averages; returns the updates, and the squares of weights and updates.

    `lists` are weights, gradients, first and second averages. The updates have five right digits: apex computes the
    powers of the betas and 1 - beta in fp32.
    """
    weights, gradients, first, second = lists
    device = weights[0].device
    updates = [torch.empty_like(weight) for weight in weights]
    overflowed = torch.zeros(1, dtype=torch.int32, device=device)
    decays = torch.full((len(weights),), decay, device=device)
    step = int(steps) - 1 if settings.bias_correction else SETTLED  # the kernel counts from 0
    tensors = [gradients, weights, first, second, updates]
    # A norm of 0 against a limit of 1 clips nothing: gradients come clipped. apex reads this norm on the host.
    options = (step, *settings.betas, settings.epsilon, torch.zeros(1), 1.0)
    amp_c.multi_tensor_lamb_stage1_cuda(CHUNK, overflowed, tensors, decays, *options)
    norms = [amp_c.multi_tensor_l2norm(CHUNK, overflowed, [tensors], True)[1] for tensors in (weights, updates)]
    return updates, torch.stack(norms, dim=1).double().square()


STEPS = Lamb
