"""The planned memory of weights, gradients and the optimizer, against the peaks of PyTorch's allocator on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support.marks import slow
from support.processes import spawn
from support.training import connect_ranks

from benchmarks.peaks import measure_peak
from pretraining.model.shape import Shape
from pretraining.processes.group import disconnect

VOCABULARY = 30522


def measure_peaks(shapes: list[Shape]) -> list[dict[str, Any]]:
    """What one rank finds."""
    connect_ranks()
    found = [measure_peak(shape, "bf16", zero) for shape in shapes for zero in range(4)]
    disconnect()
    return found


def check(shapes: list[Shape], seconds: float) -> None:
    for rank in spawn(2, measure_peaks, shapes, timeout=seconds):
        assert rank.code == 0, rank.errors[-3000:]
        for found in rank.result:
            print(found)
        assert not [found for found in rank.result if abs(found["error"]) > 0.1]


def test_memory_is_planned_as_it_is_allocated() -> None:
    check([Shape.named("mini", VOCABULARY)], 90)


@pytest.mark.parametrize("size", map(slow, ["small", "medium", "base"]))
def test_memory_of_all_sizes_is_planned_as_it_is_allocated(size: str) -> None:
    check([Shape.named(size, VOCABULARY)], 600)
