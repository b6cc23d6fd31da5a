"""One number of all ranks: the greatest that any of them brings, found in as few turns as can be.

gloo's own all-reduce hands numbers from rank to rank around all of them, twice: among 1,024 ranks, 2,046 messages one
after another in every step. Here it is 10. And each rank needs connections to few others: gloo opens them when they are
first used (`LAZY`), where it would otherwise connect every rank to every other before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAZY = "TORCH_GLOO_LAZY_INIT"
"""The variable by which PyTorch lets gloo connect two ranks when they first speak."""
TAG = 0x766F7465  # of our messages, among others of the same group


def find_greatest(own: Tensor, group: Any = None) -> Tensor:
    """The greatest of what the ranks of a gloo group bring, number by number; all of them call it together.

    In each turn a rank tells what it knows to the one so many places after it, and hears the one as many before it: 1,
    2, 4 … places. After the last, everyone has heard of everyone; of some twice, which changes no maximum.
    """
    group = dist.group.WORLD if group is None else group
    rank, ranks, distance = group.rank(), group.size(), 1
    while distance < ranks:
        heard = torch.empty_like(own)
        telling = group.send([own], (rank + distance) % ranks, TAG)
        group.recv([heard], (rank - distance) % ranks, TAG).wait()
        telling.wait()
        own = torch.maximum(own, heard)
        distance *= 2
    return own
