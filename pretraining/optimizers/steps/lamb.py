"""LAMB, exact under every ZeRO stage: each parameter has a trust ratio of its own, wherever it is cut.

The update of a parameter is Adam's with decay, times ‖weight‖ / ‖update‖: its trust ratio (You et al., 2020). ZeRO
gives an optimizer flat tensors of many parameters and parts of parameters, whose norms mean nothing. So `Lamb` adds up
the squares of each parameter's parts, and the sums of all ranks in one small fp64 all-reduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pretraining.optimizers.steps.adamw import find_adam_factors
from pretraining.optimizers.steps.flat import BLOCK, WHOLE, FlatOptimizer, FlatTensor, Rate, add_over_group


class SlotTable(NamedTuple):
    """The slots of a flat tensor on all ranks, and the stretches of them on this rank.

    A slot has one trust ratio: it is a parameter, or one of the parameters that are joined in a fused one.
    """

    slots: tuple[str, ...]
    """the names of the slots"""
    places: tuple[int, ...]
    """the slot of every stretch of this rank; with `same_bits` a slot may have several stretches"""
    stretches: Tensor
    """(stretches, 3) int64: offset, length, whether it is a whole slot"""
    group: Any
    """the process group of the ranks that hold the rest; None for this rank alone"""
    divided: tuple[int, ...] = ()
    """the slots of which the ranks of a tensor group hold a share each"""
    rows: tuple[int, ...] = ()
    """of every stretch of this rank, its row in a table of the squares of all ranks: its slot or, with `same_bits`, its
    number among the blocks of all slots"""
    counts: tuple[int, ...] = ()
    """the rows of each slot"""


class Lamb(FlatOptimizer):
    """LAMB on flat tensors. A step overwrites the gradients."""

    def __init__(self, kind: Optimizer, groups: Sequence[dict[str, Any]], settings: OptimizerSettings):
        super().__init__(kind, groups, settings)
        self._tables: dict[int, SlotTable] = {}
        """slot tables by the id of their flat tensor"""
        self._chunks: dict[int, Chunks] = {}
        self.squares: dict[tuple[str, ...], Tensor] = {}
        """the squares of weights and updates of the last step, (slots, 2), by the names of their slots; the same on all
        ranks"""

    def read_layout(self) -> None:
        self._chunks.clear()
        tables = (make_slot_table(flat, self.roles, self.shares, self.same_bits) for flat in self.flats.values())
        self._tables = dict(zip(self.flats, tables, strict=True))

    def move(self, tensors: Sequence[Tensor], learning_rate: Rate, decay: float) -> None:
        by_kernel = kernels.usable(tensors[0])
        if by_kernel and self.found_inf is not None and bool(self.found_inf):
            return  # the other ways skip a step by themselves
        steps = self.count_step(tensors)[0]
        tables = [self._tables[id(tensor)] for tensor in tensors]
        by_triton = gpu.usable("optimizer", tensors[0])
        move = self._move_by_kernel if by_kernel else self._move_by_triton if by_triton else self._move_by_torch
        squares = move(tensors, tables, steps, learning_rate, decay)
        if self.decays:
            self.squares[tuple(name for table in tables for name in table.slots)] = squares

    def _move_by_kernel(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable], steps: Tensor, learning_rate: Rate, decay: float
    ) -> Tensor:
        """Moves tensors on a CPU: a slot that is whole here moves at once, while it is cached."""
        numbers = (*find_adam_factors(self.settings, float(steps)), float(decay), float(self.scale))
        found = []
        for tensor, table in zip(tensors, tables, strict=True):
            state, squares = self.get_state(tensor), torch.zeros(len(table.stretches), 2, dtype=torch.float64)
            flats = (tensor, tensor.grad, state["exp_avg"], state["exp_avg_sq"], squares, table.stretches)
            if self.same_bits:
                kernels.call("lamb_blocks", *flats, len(squares), *numbers)
            else:
                kernels.call("lamb_update", *flats, len(squares), *numbers, -learning_rate, int(self.decays))
            found.append(torch.zeros(sum(table.counts), 2, dtype=torch.float64))
            found[-1][list(table.rows)] = squares
        total = self._add_over_ranks(torch.cat(found), tables) if self.decays else torch.cat(found)
        if self.same_bits:
            self._move_blocks(tensors, tables, -learning_rate * self._choose_ratios(total, tables))
        elif self.decays:
            ratios = find_ratios(total).tolist()
            for slot, is_whole, (weight, update, *_) in self._view_stretches(tensors, tables):
                if not is_whole:
                    weight.add_(update, alpha=-learning_rate * ratios[slot])
        return total

    def _choose_ratios(self, squares: Tensor, tables: Sequence[SlotTable]) -> Tensor:
        """Computes the trust ratios of all slots: 1 of weights that do not decay."""
        if self.decays:
            return find_ratios(squares)
        return squares.new_ones(sum(len(table.slots) for table in tables))

    def _move_blocks(self, tensors: Sequence[Tensor], tables: Sequence[SlotTable], amounts: Tensor) -> None:
        """Moves the weights of all blocks by their updates, each times the amount of its slot."""
        each = torch.split(amounts, [len(table.slots) for table in tables])
        for tensor, table, own in zip(tensors, tables, each, strict=True):
            given = own[list(table.places)].contiguous()
            kernels.call("lamb_move", tensor, tensor.grad, table.stretches, given, len(given))

    def _move_by_triton(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable], steps: Tensor, learning_rate: Rate, decay: float
    ) -> Tensor:
        """Moves tensors on a GPU by kernels of our own, in a few launches; the host waits for nothing."""
        settings, device = self.settings, tensors[0].device
        for tensor, table in zip(tensors, tables, strict=True):
            if id(tensor) not in self._chunks:
                cut = Chunks.from_stretches(table.stretches.tolist(), table.places, len(table.slots), device)
                if self.same_bits:
                    cut = cut.among_all(table.rows, table.counts)
                self._chunks[id(tensor)] = cut
        from pretraining.model import gpu_lamb  # loads Triton, which works where `usable` has said so

        scale, rate = self.scale_on(device).float(), torch.as_tensor(learning_rate, device=device)
        factors = gpu_lamb.Factors(
            settings.betas, settings.epsilon, decay, settings.bias_correction, steps, scale, rate
        )
        flats: list[Any] = [[each, each.grad, *map(self.get_state(each).get, self.kind.state)] for each in tensors]
        add: Callable[[Tensor], Tensor] = partial(self._add_over_ranks, tables=tables)
        if self.same_bits:
            add = partial(add_over_group, group=tables[0].group)
        chunks = [self._chunks[id(tensor)] for tensor in tensors]
        return gpu_lamb.step(flats, chunks, factors, add, self.decays)

    def _move_by_torch(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable], steps: Tensor, learning_rate: Rate, decay: float
    ) -> Tensor:
        """Moves tensors on any device by PyTorch's operations; the host waits for nothing."""
        betas, scale = self.settings.betas, self.scale_on(steps.device)
        finite = scale.isfinite()
        corrections = [1.0 - beta ** steps.double() if self.settings.bias_correction else 1.0 for beta in betas]
        rows = sum(sum(table.counts) for table in tables)
        squares = torch.zeros(rows, 2, dtype=torch.float64, device=steps.device)
        stretches = [*self._view_stretches(tensors, tables)]
        for row, (*_, (weight, update, *averages)) in zip(self._list_rows(tables), stretches, strict=True):
            gradient = update * scale
            for average, new, beta in zip(averages, (gradient, gradient.square()), betas, strict=True):
                average.copy_(torch.where(finite, average.lerp(new, 1.0 - beta), average))
            mean, square = (average / each for average, each in zip(averages, corrections, strict=True))
            update.copy_(mean / (square.sqrt() + self.settings.epsilon) + decay * weight)
            squares[row] = torch.stack([each.double().square().sum() for each in (weight, update)])
        squares = self._add_over_ranks(squares, tables) if self.decays else squares
        rates = learning_rate * self._choose_ratios(squares, tables)
        for slot, _, (weight, update, *_) in stretches:
            weight.copy_(torch.where(finite, weight - rates[slot] * update, weight))
        return squares

    def _view_stretches(
        self, tensors: Sequence[Tensor], tables: Sequence[SlotTable]
    ) -> Iterator[tuple[int, bool, list[Tensor]]]:
        """Yields this rank's stretches: the slot of each, whether it is whole here, and its weights, gradients and both
        averages."""
        begin = 0
        for tensor, table in zip(tensors, tables, strict=True):
            flats: list[Any] = [tensor, tensor.grad, *map(self.get_state(tensor).get, self.kind.state)]
            for slot, (offset, length, whole) in zip(table.places, table.stretches.tolist(), strict=True):
                yield begin + slot, bool(whole), [flat.view(-1).narrow(0, offset, length) for flat in flats]
            begin += len(table.slots)

    def _list_rows(self, tables: Sequence[SlotTable]) -> Iterator[int]:
        """Yields the row of every stretch in a table of the squares of all tensors."""
        begins = itertools.accumulate((sum(table.counts) for table in tables), initial=0)
        for begin, table in zip(begins, tables, strict=False):
            yield from (begin + row for row in table.rows)

    def _add_over_ranks(self, squares: Tensor, tables: Sequence[SlotTable]) -> Tensor:
        """Adds up the squares of slots, (slots, 2), over the ranks that hold parts of them; with `same_bits` those of
        their blocks, always in the same order."""
        total = add_over_group(squares, tables[0].group)  # exact for blocks: all ranks but one add zeros
        if self.same_bits:
            counts = [count for table in tables for count in table.counts]
            return torch.stack([each.sum(0) for each in torch.split(total, counts)])
        begins = itertools.accumulate((len(table.slots) for table in tables), initial=0)
        divided = [begin + slot for begin, table in zip(begins, tables, strict=False) for slot in table.divided]
        if divided:
            total[divided] = add_over_group(total[divided], self.shares.mesh.tensor_group)
        return total


def find_ratios(squares: Tensor) -> Tensor:
    """Computes trust ratios from the squares of weights and updates, (slots, 2): 1 where one of them is 0."""
    weight, update = squares.unbind(1)
    return torch.where((weight > 0) & (update > 0), (weight / update).sqrt(), 1.0)


def make_slot_table(
    flat: FlatTensor, roles: Mapping[str, Role], shares: Shares = WHOLE, same_bits: bool = False
) -> SlotTable:
    """Lists the slots of a flat tensor: a fused parameter is divided into equal blocks of rows, a slot for each. With
    `same_bits`, stretches end with the blocks of the parameter."""
    slots: list[str] = []
    divided: list[int] = []
    places, rows, stretches, counts = [], [], [], list[int]()
    for name, size in flat.sizes.items():
        count, parts = roles[name].parts, [part for part in flat.parts if part.name == name]
        slot = size // count
        for number in range(count):
            begin, end = number * slot, (number + 1) * slot
            cuts = [begin, *(range(begin // BLOCK * BLOCK + BLOCK, end, BLOCK) if same_bits else ()), end]
            for row, (low, high) in enumerate(itertools.pairwise(cuts), sum(counts)):
                for part in parts:
                    first, last = max(part.start, low), min(part.start + part.length, high)
                    if first < last:
                        places.append(len(slots))
                        rows.append(row)
                        is_whole = last - first == slot and name not in shares
                        stretches.append((part.offset + first - part.start, last - first, int(is_whole)))
            divided += [len(slots)] if name in shares else []
            counts.append(len(cuts) - 1)
            slots.append(name if count == 1 else f"{name}[{number}]")
    table = torch.tensor(stretches, dtype=torch.int64).view(-1, 3)
    return SlotTable(tuple(slots), tuple(places), table, flat.group, tuple(divided), tuple(rows), tuple(counts))


STEPS = Lamb
