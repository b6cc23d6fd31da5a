"""How the ranks of a run give one another their gradients and weights: over a network, or in memory (`neighbours.py`).

Over a network, gradients are joined bucket by bucket while the last backward pass still runs; a sum goes to the rank
whose share it is, alone. Between so many GPUs that a bucket has shares of many ranks, all are joined at once after it:
NCCL reduces to one rank after another, reckoned to take 0.3 to 0.5 s between 1,024; a whole tensor takes 45 ms.
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
    """Joins the gradients of all ranks, in the same buckets in the same order on each."""

    shares_weights: ClassVar[bool] = False
    """whether all ranks read the same weights in memory, so that nobody needs to send what it has moved"""

    def place(self, weights: Tensor) -> Tensor:
        """Returns flat weights where they are to lie, before parameters become views of them. All ranks call it."""
        return weights

    def prepare(self, flats: Sequence[Tensor], group: Any, bucket_size: int) -> None:
        """Learns the flat tensors of gradients, the group of ranks that share them, and the elements of a bucket."""

    def join_full(self, buckets: Sequence[Bucket]) -> None:
        """May start to join the buckets that are full, in the last backward pass of a step."""

    def join(self, buckets: Sequence[Bucket]) -> None:
        """Adds the sums of all ranks up in each rank's shares of the buckets."""
        raise NotImplementedError

    def break_off(self) -> None:
        """Forgets what is under way: the step was broken off, or is over."""


class Network(Exchange):
    """Joins gradients by torch's process group."""

    def __init__(self, wire: torch.dtype):
        self._wire = wire
        """the type of numbers in which gradients go from rank to rank"""
        self._under_way: list[Joining] = []
        self._broken_off: list[Joining] = []
        self._sent = 0
        """how many buckets are under way or joined"""

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
        """What is then on its way to other ranks keeps its memory, into which they may still write: nobody waits for
        them, since they may have ended."""
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
        """Starts to add up the next bucket over all ranks, each part of it where its owner is."""
        self._sent += 1
        bucket.complete()
        if self._ranks > 1:
            bucket.rows.clear()  # others have other rows
            self._under_way.append(Joining(bucket.sums, bucket.shares, self._wire, self._group))
