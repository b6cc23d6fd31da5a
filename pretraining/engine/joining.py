"""Adds up a bucket of gradients over all ranks; each rank gets the sums of its share alone.

Between CPUs, gloo runs a reduction for each share. With NCCL, latency would then grow with the square of the ranks: a
reduction for each rank, through all ranks. So NCCL gets one launch for each bucket: a reduce-scatter where all ranks
have shares of the same size, as in a whole flat tensor, and otherwise all reductions in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name until torch 2.12


class Share(NamedTuple):
    """The part of a bucket that lies in one rank's share."""

    owner: int
    sums: Tensor


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
