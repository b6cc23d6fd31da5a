"""Buckets of gradients: neighbouring parameters, whose sums lie end to end in a flat tensor; norm and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence, Set
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels

ROW = 1 << 14
"""Without our kernels, the squares of this many elements are added up in fp32, and these sums in fp64. PyTorch on a CPU
adds up all in fp32, which makes the norm of 8 million elements 4e-4 wrong."""


class Share(NamedTuple):
    """The part of a bucket that lies in one rank's share."""

    owner: int
    sums: Tensor


class Bucket:
    """Neighbouring parameters, whose gradients are added up and exchanged together."""

    def __init__(self, sums: Tensor, views: dict[int, Tensor], shares: Sequence[Share]):
        """`sums` is their slice of the flat tensor, and `views` each parameter's part of it by number, in its shape.

        The slice with the last parameters includes the padding of the flat tensor.
        """
        self.sums, self.views, self.shares = sums, views, shares
        places = [self.place(number) for number in views]
        self.has_gaps = any(one.stop != other.start for one, other in pairwise(places))  # numbers of no parameter
        self.gathers = sums.device.type != "cpu"
        """whether gradients are kept until all are there: launching a large operation costs no more than a small one"""
        self.kept: dict[int, Tensor] = {}
        self.came: set[int] = set()
        """the parameters that have a gradient in this backward pass"""
        self.summed: set[int] = set()
        """the parameters whose sums are of this step; the sums of others are of an earlier step"""
        self.uncounted: Set[int] = frozenset()
        """the parameters that are left out of the norm on this rank: all ranks of the tensor group hold them whole, and
        the first adds their squares"""
        self.rows: dict[int, Tensor] = {}
        """for sparse tables, the rows whose sums are not zero, each once. They stay from step to step: code that writes
        sums otherwise must clear them"""

    def take(self, number: int, gradient: Tensor) -> bool:
        """Takes the gradient of a parameter in this backward pass; returns whether all have one now."""
        if number in self.kept:
            self.add_kept()
        self.came.add(number)
        self.kept[number] = gradient if gradient.is_sparse else gradient.reshape(-1)
        is_full = len(self.came) == len(self.views)
        if is_full or not self.gathers:
            self.add_kept()
        return is_full

    @property
    def is_full(self) -> bool:
        """Whether all parameters have a gradient in this backward pass."""
        return len(self.came) == len(self.views)

    def add_kept(self) -> None:
        """Adds the kept gradients to the sums, in one operation if all are there."""
        alike = len(self.summed) in (0, len(self.views))
        if self.gathers and not self.has_gaps and alike and len(self.kept) == len(self.views):
            together = torch.cat([self.kept[number] for number in self.views])
            self.add(together, self.sums[: len(together)], adds=bool(self.summed))
        else:
            for number, gradient in self.kept.items():
                self._add(number, gradient)
        self.summed.update(self.kept)
        self.kept.clear()

    def _add(self, number: int, gradient: Tensor) -> None:
        if gradient.is_sparse:
            self.add_rows(number, gradient._indices()[0], gradient._values(), adds=number in self.summed)
        else:
            self.rows.pop(number, None)
            self.add(gradient, self.views[number].view(-1), adds=number in self.summed)

    def add(self, gradient: Tensor, sums: Tensor, adds: bool) -> None:
        """Adds a gradient to sums, or without `adds` replaces them; both are flat."""
        if kernels.usable(gradient):
            kernels.call("add_gradient", gradient, sums, len(sums), int(adds))
        elif adds:
            sums.add_(gradient)
        else:
            sums.copy_(gradient)

    def add_rows(self, number: int, which: Tensor, rows: Tensor, adds: bool = True) -> None:
        """Adds to some rows of a table, or without `adds` replaces all its sums by these rows."""
        table, touched = self.views[number], self.rows.get(number)
        if not adds:
            table.zero_() if touched is None else table.index_fill_(0, touched, 0.0)
            self.rows[number] = torch.unique(which)
        elif touched is not None:
            self.rows[number] = torch.unique(torch.cat([touched, which]))
        table.index_add_(0, which, rows.float())

    def place(self, number: int) -> slice:
        """Returns the place of a parameter's sums among those of the bucket."""
        begin = self.views[number].storage_offset() - self.sums.storage_offset()
        return slice(begin, begin + self.views[number].numel())

    def find_parts(self, share: Share, without: Container[int]) -> Iterator[slice]:
        """Yields the parts of a share, leaving out some parameters; neighbouring parameters are one part."""
        low = share.sums.storage_offset() - self.sums.storage_offset()
        begin = end = low
        for number in self.views:
            place = self.place(number)
            if number in without:
                if begin < end:
                    yield slice(begin, end)
                begin = end = max(low, min(place.stop, low + len(share.sums)))
            else:
                end = max(low, min(place.stop, low + len(share.sums)))
        if begin < end:
            yield slice(begin, end)

    def squares(self, share: Share) -> Tensor:
        """Adds up the squares of a share's sums; of sparse tables, only the rows that are not zero are read."""
        parts = [self.sums[part] for part in self.find_parts(share, without=self.rows.keys() | self.uncounted)]
        for number in sorted(self.rows.keys() - self.uncounted):
            rows, table, begin = self.rows[number], self.views[number], self.place(number).start
            low = share.sums.storage_offset() - self.sums.storage_offset() - begin
            high, width = min(low + len(share.sums), table.numel()), table.numel() // len(table)
            low = max(low, 0)
            first, last = -(-low // width), high // width  # rows that are whole in the share
            whole = table[rows[(rows >= first) & (rows < last)]]
            ends = [slice(low, min(first * width, high)), slice(max(last * width, low, first * width), high)]
            parts += [whole.flatten(), *(table.view(-1)[end] for end in ends if end.start < end.stop)]
        return torch.stack([add_squares(part) for part in parts]).sum() if parts else torch.zeros(()).double()

    def end_pass(self) -> None:
        """Ends a backward pass."""
        self.add_kept()
        self.came.clear()

    def complete(self) -> None:
        """Completes the sums of a step: those of parameters without a gradient become 0."""
        self.add_kept()
        for number in self.views.keys() - self.summed:
            self.rows.pop(number, None)
            self.views[number].zero_()

    def forget(self) -> None:
        """Begins a step."""
        for known in (self.kept, self.came, self.summed):
            known.clear()


def make_buckets(
    flat: Tensor,
    shapes: Sequence[Sequence[int]],
    ranks: int,
    limit: int,
    offsets: Sequence[int] | None = None,
    kind: Callable[..., Bucket] = Bucket,
) -> Iterator[Bucket]:
    """Cuts a flat tensor of parameters with these shapes into buckets; the last come first, as in a backward pass.
    Without `offsets`, parameters lie end to end."""
    sizes = [math.prod(shape) for shape in shapes]
    begins, share = offsets or [0, *accumulate(sizes)], flat.numel() // ranks
    ends = [begin + size for begin, size in zip(begins, sizes, strict=False)]
    stop = len(sizes)
    while stop:
        first = stop - 1
        while first and ends[stop - 1] - begins[first - 1] <= limit:
            first -= 1
        begin, end = begins[first], begins[stop] if stop < len(sizes) else flat.numel()
        views = {number: flat[begins[number] : ends[number]].view(*shapes[number]) for number in range(first, stop)}
        owners = range(begin // share, (end - 1) // share + 1)
        cuts = [(owner, max(begin, owner * share), min(end, (owner + 1) * share)) for owner in owners]
        yield kind(flat[begin:end], views, [Share(owner, flat[low:high]) for owner, low, high in cuts])
        stop = first


def add_squares(flat: Tensor) -> Tensor:
    """Adds up the squares of a flat tensor's elements in fp64."""
    if kernels.usable(flat) and flat.dtype == torch.float32:
        added = torch.empty((), dtype=torch.float64)
        kernels.call("add_squares", flat.contiguous(), added, len(flat))
        return added
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    squares: Tensor = rows.square().sum() + rest.square()
    return squares


def find_clip_factor(norm: Tensor | float, limit: float) -> Tensor | float:
    """Computes the factor that clips a gradient of this norm to the limit, as PyTorch does; a limit of 0 is none.

    For a norm on a device that is not finite the factor is NaN, and the optimizer moves nothing.
    """
    if isinstance(norm, Tensor):
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
        return torch.where(norm.isfinite(), factor, math.nan)
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
