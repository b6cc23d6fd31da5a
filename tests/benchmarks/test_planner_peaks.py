"""The planned memory of weights, gradients and the optimizer, against the peaks of PyTorch's allocator on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support.marks import slow
from support.processes import spawn
from support.training import connect_ranks

from benchmarks.calibration import measure_peak
from pretraining.model.shape import Shape
from pretraining.processes.group import disconnect

VOCABULARY = 30522


ALLOWED = 0.1


def measure(size: str, zero: int) -> dict[str, Any]:
    """What one rank finds."""
    connect_ranks()
    found = measure_peak(Shape.named(size, VOCABULARY), "bf16", zero)
    disconnect()
    return found


CASES = [
    *(slow("mini", zero) for zero in range(4)),
    *(slow(size, zero) for size in ("small", "medium", "base") for zero in range(4)),
]


@pytest.mark.parametrize(("size", "zero"), CASES)
def test_memory_is_planned_as_it_is_allocated(size: str, zero: int) -> None:
    """Frees that the profiler misses can only make a peak look larger: of ranks and tries the lowest counts, and it is
    tried again only where that is too high."""
    found: list[dict[str, Any]] = []
    for _ in range(3 if zero == 3 else 1):
        for rank in spawn(2, measure, size, zero, timeout=300):
            assert rank.code == 0, rank.errors[-3000:]
            found.append(rank.result)
        lowest = min(found, key=lambda each: int(each["peak"]))
        if abs(lowest["error"]) <= ALLOWED:
            return
    pytest.fail(f"{size}: {found}")
