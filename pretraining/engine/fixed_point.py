"""Sums of gradients that are the same bits on any number of ranks (`parallel.same_bits`).

Gradients are added as integers, in units of 2⁻⁵⁰: then any order of addition gives the same number. That is finer than
fp32 for every gradient above 1e-8. A sum may be up to 8,192; so that none wraps around, each gradient must be within
8,191 by the number of micro-batches of the step, and a step with another one is left out, as one with a NaN.

Squares are added in fp64, first those of each block of a parameter, whatever rank has it. So the share of every rank
begins and ends where a block does: `lay_out` finds the places of parameters in a flat tensor for that. Kernels that
move weights then have no remainder of a vector at the end of a share either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.mixed_precision_linkage import link_hp_params
from torch import Tensor

from pretraining.engine.buckets import Bucket, Share
from pretraining.engine.exchange import Exchange
from pretraining.engine.gradients import Zero1, choose_exchange
from pretraining.model import cpu_kernels as kernels
from pretraining.optimizers.steps.flat import BLOCK, FlatOptimizer

UNITS = 2.0**50
"""The units of 1."""
LARGEST = 8191.0
"""The largest sum: a little less than 2⁶³ units, so that no rounding of a limit reaches them."""
STACK = 1 << 10
"""The most blocks whose squares are added up together."""
ALIGNED = 32
"""Parameters begin at multiples of this many numbers, 64 bytes in 16 bits: products may round otherwise elsewhere."""


class LargestGradient:
    """The largest gradient of a step that sums of `addends` gradients can take, and whether one was larger."""

    def __init__(self, device: torch.device):
        self.addends = 1
        self.broken = torch.zeros((), dtype=torch.int64, device=device)
        """1 after a gradient that was larger, 3 after one that was not finite"""

    @property
    def largest(self) -> float:
        """The largest gradient."""
        return LARGEST / self.addends

    def add(self, gradient: Tensor, sums: Tensor, adds: bool) -> None:
        """Adds a gradient to sums, or without `adds` replaces them; both are flat."""
        if kernels.usable(gradient):
            kernels.call("add_fixed", gradient, sums, self.broken, len(sums), int(adds), self.largest)
            return
        units = self.convert(gradient)
        sums.add_(units) if adds else sums.copy_(units)

    def convert(self, gradient: Tensor) -> Tensor:
        """Converts a gradient to units; what is too large becomes 0."""
        gradient = gradient.float()
        fits = gradient.abs() <= self.largest  # false for NaN
        self.broken.bitwise_or_(fits.logical_not().any() + 2 * gradient.isfinite().logical_not().any())
        return torch.where(fits, gradient * UNITS, 0.0).round_().long()


class FixedBucket(Bucket):
    """A bucket of sums in fixed point; it has no sparse tables, whose rows are added to the sums of all rows."""

    def __init__(self, limit: LargestGradient, sums: Tensor, views: dict[int, Tensor], shares: Sequence[Share]):
        super().__init__(sums, views, shares)
        self._limit = limit

    def take(self, number: int, gradient: Tensor) -> bool:
        assert number not in self.came, "two gradients of a parameter in a backward pass: the limit allows one"
        return super().take(number, gradient)

    def add(self, gradient: Tensor, sums: Tensor, adds: bool) -> None:
        self._limit.add(gradient, sums, adds)

    def add_rows(self, number: int, which: Tensor, rows: Tensor, adds: bool = True) -> None:
        table = self.views[number]
        if not adds:
            table.zero_()
        table.index_add_(0, which, self._limit.convert(rows))


class ParameterPlaces(NamedTuple):
    """The places of parameters in a flat tensor."""

    offsets: tuple[int, ...]
    """the first number of each parameter"""
    total: int
    """the numbers of the tensor, equally many of each rank"""


def lay_out(sizes: Sequence[int], ranks: int) -> ParameterPlaces:
    """Lays parameters of these sizes one after another, with room between them, so that no share of a rank ends within
    a block of a parameter."""
    share = -(-sum(sizes) // (ranks * BLOCK)) * BLOCK
    while True:
        offsets, end = [], 0
        for size in sizes:
            begin = -(-end // ALIGNED) * ALIGNED
            border = -(-(begin + 1) // share) * share
            if begin + size > border:  # blocks of a parameter that is longer than a block then end at the border
                begin = border if size <= BLOCK else -(-begin // BLOCK) * BLOCK
            offsets.append(begin)
            end = begin + size
        if end <= ranks * share:
            return ParameterPlaces(tuple(offsets), ranks * share)
        share += BLOCK


def find_blocks(places: ParameterPlaces, sizes: Sequence[int]) -> Tensor:
    """Lists the blocks of all parameters of a flat tensor: the offset and the length of each, (blocks, 2) int64."""
    each = zip(places.offsets, sizes, strict=True)
    blocks = [(offset + at, min(BLOCK, size - at)) for offset, size in each for at in range(0, size, BLOCK)]
    return torch.tensor(blocks)


Runs = list[tuple[int, int]]


def find_runs(blocks: Tensor) -> Runs:
    """Joins blocks that lie end to end, if all but the last are full; lists where each such run begins and ends."""
    ends = blocks.sum(1)
    is_last = torch.ones(len(blocks), dtype=torch.bool)
    is_last[:-1] = (ends[:-1] != blocks[1:, 0]) | (blocks[:-1, 1] < BLOCK)
    is_first = torch.cat([is_last[-1:], is_last[:-1]])
    return [*zip(blocks[is_first, 0].tolist(), ends[is_last].tolist(), strict=True)]


def add_block_squares(flat: Tensor, blocks: Tensor, runs: Sequence[Runs]) -> Tensor:
    """Adds up the squares of each block of a flat tensor, in fp64: (blocks,). `runs` are those of STACK blocks each."""
    squares = torch.empty(len(blocks), dtype=torch.float64, device=flat.device)
    if kernels.usable(flat):
        kernels.call("add_block_squares", flat, squares, blocks, len(blocks))
        return squares
    zeros = flat.new_zeros(BLOCK)
    for stack, own in zip(torch.split(squares, STACK), runs, strict=True):
        rows = torch.cat([zeros[:0], *(each for at, to in own for each in (flat[at:to], zeros[: (at - to) % BLOCK]))])
        halves = rows.view(-1, BLOCK).double().square_()
        while halves.shape[1] > 1:  # additions of two numbers each: no shape or device has another order
            one, other = halves.chunk(2, 1)
            halves = one + other
        stack.copy_(halves[:, 0])
    return squares


class FixedPointZero1(Zero1):
    """`Zero1` with sums in fixed point, whose bits do not depend on the number of ranks."""

    def __init__(self, optimizer: FlatOptimizer, engine: DeepSpeedEngine):
        groups = [group["params"] for group in optimizer.param_groups]
        ranks, group = dist.get_world_size(engine.seq_data_parallel_group), engine.seq_data_parallel_group
        sizes = [[*map(torch.numel, each)] for each in groups]
        self._layouts = [lay_out(each, ranks) for each in sizes]
        self._padding = sum(layout.total - sum(each) for layout, each in zip(self._layouts, sizes, strict=True))
        self.limit = LargestGradient(groups[0][0].device)
        self.make_bucket = partial(FixedBucket, self.limit)
        super().__init__(optimizer, engine)
        self.asks_ranks = True  # also a rank alone: no graph has the conversion of sums in it
        self.own_gradients = [torch.zeros_like(weights).detach() for weights in self.fp32_groups_flat_partition]
        self._blocks: list[tuple[int, Tensor, list[Runs]]] = []
        """of each flat tensor, the number of the first block in this rank's share, these blocks, and their runs"""
        self._num_blocks = 0
        for layout, each in zip(self._layouts, sizes, strict=True):
            blocks, begin = find_blocks(layout, each), dist.get_rank(group) * layout.total // ranks
            is_before, ends = blocks[:, 0] < begin, begin + layout.total // ranks
            own = blocks[~is_before & (blocks[:, 0] < ends)] - torch.tensor([begin, 0])
            runs = [*map(find_runs, torch.split(own, STACK))]
            self._blocks.append((self._num_blocks + int(is_before.sum()), own, runs))
            self._num_blocks += len(blocks)

    def choose_exchange(self, parameters: Sequence[Tensor], wire: torch.dtype) -> Exchange:  # noqa: ARG002
        return choose_exchange(parameters, torch.int64, padding=self._padding)

    def list_offsets(self, group: int) -> Sequence[int]:
        return self._layouts[group].offsets

    def _setup_for_real_optimizer(self) -> None:
        self.grad_acc_dtype = torch.int64  # of the sums: DeepSpeed makes nothing else of this type
        super()._setup_for_real_optimizer()

    def _flatten_dense_tensors_aligned(self, tensors: Sequence[Tensor], alignment: int) -> Tensor:  # noqa: ARG002
        layout = self._layouts[len(self.bf16_groups_flat)]
        flat = tensors[0].new_zeros(layout.total)
        for offset, tensor in zip(layout.offsets, tensors, strict=True):
            flat[offset : offset + tensor.numel()] = tensor.detach().view(-1)
        return self._exchange.place(flat)

    def _update_storage_to_flattened_tensor(self, tensor_list: Sequence[Tensor], flat_tensor: Tensor) -> None:
        for offset, tensor in zip(self._layouts[len(self.bf16_groups_flat) - 1].offsets, tensor_list, strict=True):
            tensor.data = flat_tensor[offset : offset + tensor.numel()].view_as(tensor)

    def _link_all_hp_params(self) -> None:
        rank, link = dist.get_rank(self.dp_process_group), partial(link_hp_params, dp_group=self.dp_process_group)
        for number, weights in enumerate(self.fp32_groups_flat_partition):
            given = self.bf16_groups[number], weights, self.fp32_groups_gradient_dict, None, False, number
            link(*given, rank * len(weights), len(weights), param_offsets=self.list_offsets(number))

    def _add_squares(self) -> Tensor:
        """Converts this rank's sums to fp32; adds up the squares of all. They are infinite after a gradient that was
        too large on any rank, NaN after one that was not finite."""
        squares = self.own_gradients[0].new_zeros(self._num_blocks + 1, dtype=torch.float64)
        sums = self.fp32_groups_gradient_flat_partition
        for units, gradients, (first, blocks, runs) in zip(sums, self.own_gradients, self._blocks, strict=True):
            if kernels.usable(gradients):
                kernels.call("take_fixed", gradients, units, len(units))
            else:
                gradients.copy_(units).mul_(1 / UNITS)
            squares[first : first + len(blocks)] = add_block_squares(gradients, blocks, runs)
        squares[-1] = torch.where(self.limit.broken == 1, math.inf, torch.where(self.limit.broken > 1, math.nan, 0.0))
        if self._ranks > 1:
            dist.all_reduce(squares, group=self._group)  # exact: of each number, all ranks but one add zeros
        return squares.sum()

    def clear_hp_grads(self) -> None:
        super().clear_hp_grads()
        self.limit.broken.zero_()
