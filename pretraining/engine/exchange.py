"""Exchanges gradients and weights between the ranks of a run: over a network, or in memory (`neighbours.py`).

Over a network, gradients are reduced bucket by bucket while the last backward pass still runs; only the rank that owns
a share gets its sums. Between so many GPUs that a bucket has shares of many ranks, whole tensors are reduced after the
backward pass: NCCL reduces to one rank after another, an estimated 0.3 to 0.5 s between 1,024; a whole tensor takes 45
ms.

Between CPUs, gloo runs a reduction for each share. With NCCL, latency would then grow with the square of the ranks: a
reduction for each rank, through all ranks. So NCCL gets one launch for each bucket: a reduce-scatter where all ranks
have shares of the same size, as in a whole flat tensor, and otherwise all reductions in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from pretraining.engine.buckets import Bucket, Share

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name until torch 2.12


class Exchange:
    """Adds up the gradients of all ranks, in the same buckets in the same order on each."""

    shares_weights: ClassVar[bool] = False
    """whether all ranks read the same weights in memory, so that no rank sends its share"""

    def place(self, weights: Tensor) -> Tensor:
        """Moves flat weights to their memory, before parameters become views of them. All ranks call it."""
        return weights

    def prepare(self, flats: Sequence[Tensor], group: Any, bucket_size: int) -> None:
        """Takes the flat tensors of gradients, the group of ranks that share them, and the elements of a bucket."""

    def join_full(self, buckets: Sequence[Bucket]) -> None:
        """May start to exchange the buckets that are full, in the last backward pass of a step."""

    def join(self, buckets: Sequence[Bucket]) -> None:
        """Adds up the sums of all ranks in each rank's shares of the buckets."""
        raise NotImplementedError

    def break_off(self) -> None:
        """Forgets the reductions that are under way, since the step was broken off or is over."""


class Joining:
    """A reduction of a bucket that is under way."""

    def __init__(self, sums: Tensor, shares: Sequence[Share], wire: torch.dtype, group: Any):
        """Starts to add up `sums`, which the shares divide, in numbers of the type `wire`."""
        wired = sums.to(wire)
        parts = torch.split(wired, [len(share.sums) for share in shares])
        rank, pairs = dist.get_rank(group), [*zip(shares, parts, strict=True)]
        self._wired = wired  # it has to stay until the sums are there
        self._arrivals = [] if wired is sums else [(share.sums, part) for share, part in pairs if share.owner == rank]
        self._works: list[Any] = []
        if not launches_together(group):
            self._works = [_reduce(part, share.owner, group) for share, part in pairs]
        elif len(parts) == dist.get_world_size(group) and len({len(part) for part in parts}) == 1:
            self._works = [reduce_scatter(parts[rank], wired, group=group, async_op=True)]
        else:
            with _coalescing_manager(group, wired.device, async_ops=True) as together:
                for share, part in pairs:
                    _reduce(part, share.owner, group)
            self._works = [together]

    def finish(self) -> None:
        """Waits for the sums, and copies them to this rank's share."""
        for work in self._works:
            work.wait()
        for sums, part in self._arrivals:
            sums.copy_(part)


def _reduce(part: Tensor, owner: int, group: Any) -> Any:
    return dist.reduce(part, group_dst=owner, group=group, async_op=True)


def launches_together(group: Any) -> bool:
    """Whether several reductions between these ranks can be one launch, which only NCCL supports."""
    return bool(dist.get_backend(group) == "nccl")


class Network(Exchange):
    """Exchanges gradients by torch's process group."""

    def __init__(self, wire: torch.dtype):
        self._wire = wire
        """the type in which gradients are sent"""
        self._under_way: list[Joining] = []
        self._broken_off: list[Joining] = []
        self._sent = 0
        """the number of buckets that are under way or done"""

    def prepare(self, flats: Sequence[Tensor], group: Any, bucket_size: int) -> None:
        self._flats, self._group, self._ranks = flats, group, dist.get_world_size(group)
        shares_are_small = all(4 * flat.numel() < self._ranks * bucket_size for flat in flats)
        self._joins_whole = self._ranks > 1 and launches_together(group) and shares_are_small

    def join_full(self, buckets: Sequence[Bucket]) -> None:
        while not self._joins_whole and self._sent < len(buckets) and buckets[self._sent].is_full:
            self._send(buckets[self._sent])

    def join(self, buckets: Sequence[Bucket]) -> None:
        if self._joins_whole:
            self._send_whole(buckets)
        while self._sent < len(buckets):
            self._send(buckets[self._sent])
        for joining in self._under_way:
            joining.finish()
        self._under_way.clear()
        self._sent = 0

    def break_off(self) -> None:
        """Keeps the memory of reductions that are under way, into which other ranks may still write. It does not wait
        for them, since they may have ended."""
        self._broken_off += self._under_way
        self._under_way.clear()
        self._sent = 0

    def _send_whole(self, buckets: Sequence[Bucket]) -> None:
        """Starts to add up all flat tensors over all ranks."""
        for bucket in buckets:
            bucket.complete()
            bucket.rows.clear()
        self._sent = len(buckets)
        for flat in self._flats:
            shares = [Share(rank, part) for rank, part in enumerate(flat.chunk(self._ranks))]
            self._under_way.append(Joining(flat, shares, self._wire, self._group))

    def _send(self, bucket: Bucket) -> None:
        """Starts to add up the next bucket over all ranks, each share at its owner."""
        self._sent += 1
        bucket.complete()
        if self._ranks > 1:
            bucket.rows.clear()  # others have other rows
            self._under_way.append(Joining(bucket.sums, bucket.shares, self._wire, self._group))
