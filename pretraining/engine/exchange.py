"""Exchanges gradients and weights between the ranks of a run: over a network, or in memory (`neighbours.py`).

Over a network, gradients are reduced bucket by bucket while the last backward pass still runs; only the rank that owns
a share gets its sums. Between so many GPUs that a bucket has shares of many ranks, whole tensors are reduced after the
backward pass: NCCL reduces to one rank after another, an estimated 0.3 to 0.5 s between 1,024; a whole tensor takes 45
ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining.engine.buckets import Bucket
from pretraining.engine.joining import Joining, Share, launches_together


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
