"""Measures the hardware: memory and its peak, FLOP/s of matrix products, memory bandwidth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from data_prep.common.capacity import read_memory_limits

ROUNDS = 4
"""Measurements of each matrix product."""


def synchronize(device: torch.device | None) -> None:
    """Waits until the GPU has finished its work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def read_peak_memory(device: torch.device) -> int:
    """Reads the peak memory of this process in bytes: on its GPU, or in main memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status").read_text()  # getrusage would include the memory of who started this program
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def read_total_memory(device: torch.device) -> int:
    """Reads the memory in bytes: of the GPU, or of the machine within the limits of this container or job."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *read_memory_limits()])


Product = tuple[int, int, int]
"""The sizes of a matrix product: pieces, from, to."""


def measure_flops(
    device: torch.device, dtype: torch.dtype, budget: float = 0.8, products: Sequence[Product] = ()
) -> float:
    """Measures the FLOP/s of matrix products, by default as in an encoder: the ceiling of a training step.

    Tries a few shapes in several rounds and returns the best of their medians, so that another program that is busy for
    a moment does not lower the result; begins no round after `budget` seconds.
    """
    pieces = 32768 if device.type == "cuda" else 2048  # on a GPU as many as in a large step, until all of it is at work
    shapes = products or [(pieces, 768, 3072), (pieces, 1024, 4096), (pieces, 4096, 1024)]
    deadline, best = time.perf_counter() + budget, 0.0
    for _ in range(ROUNDS):
        best = max(best, *(_measure_product(device, dtype, shape, budget / len(shapes) / ROUNDS) for shape in shapes))
        if time.perf_counter() > deadline:
            break
    return best


def _measure_product(device: torch.device, dtype: torch.dtype, shape: Product, budget: float) -> float:
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(columns, inner, device=device).to(dtype)
    repeats = 8 if device.type == "cuda" else 1  # a GPU's clock needs something to measure

    @torch.no_grad()
    def multiply() -> None:
        for _ in range(repeats):
            torch.nn.functional.linear(left, weight)

    return 2.0 * rows * inner * columns * repeats / measure_seconds(device, multiply, budget)


def measure_memory_bandwidth(device: torch.device, budget: float = 0.5) -> float:
    """Measures the bytes a second read and written when a large tensor is copied: the ceiling of other operations."""
    source = torch.ones(1 << 28 if device.type == "cuda" else 1 << 26, device=device)  # larger than any cache
    copy = torch.empty_like(source)
    return 2.0 * source.nbytes / measure_seconds(device, lambda: copy.copy_(source), budget)


def measure_seconds(device: torch.device, work: Callable[[], object], budget: float) -> float:
    """Measures the median seconds of some work, repeated for `budget` seconds after a warm-up."""
    seconds: list[float] = []
    deadline = time.perf_counter() + budget
    while len(seconds) < 2 or time.perf_counter() < deadline:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
