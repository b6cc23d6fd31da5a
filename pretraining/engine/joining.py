"""Adds up the sums of a bucket over all ranks, each part of them at the rank whose share it is, alone.

Between CPUs, gloo makes a reduction for each share. NCCL would take as many in a step as there are ranks, each through
all of them, so that latency grew with the square of the ranks. It gets one launch a bucket, whatever the ranks: a
reduce-scatter where all ranks have shares of the same size in it, as in a whole flat tensor, and else all its
reductions together.
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
    """The sums of a bucket on their way."""

    def __init__(self, sums: Tensor, shares: Sequence[Share], wire: torch.dtype, group: Any):
        """Starts to add up `sums`, of which the shares are the parts, in numbers of the type `wire`."""
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
        """Waits for the sums, and puts this rank's share where it belongs."""
        for work in self._works:
            work.wait()
        for sums, part in self._arrivals:
            sums.copy_(part)


def _reduce(part: Tensor, owner: int, group: Any) -> Any:
    return dist.reduce(part, group_dst=owner, group=group, async_op=True)


def launches_together(group: Any) -> bool:
    """Whether several reductions between these ranks can be one launch, which NCCL alone knows."""
    return bool(dist.get_backend(group) == "nccl")
