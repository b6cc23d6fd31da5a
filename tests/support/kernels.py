"""How this process computes within a block: with our kernels or without, and by how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pretraining.model import cpu_kernels


@contextmanager
def kernels_allowed(allowed: bool) -> Iterator[None]:
    cpu_kernels.allow(allowed)
    try:
        yield
    finally:
        cpu_kernels.allow(True)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
