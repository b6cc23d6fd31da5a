"""Measures what bounds a step: launches of the host, attention alone, and products in FP8."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.training_sides import Contest
from data_prep.common.launchers import World
from pretraining.engine.precision import choose_dtype
from pretraining.model import gpu_layouts
from pretraining.model.attention import lay_out
from pretraining.model.batch import PretrainingBatch
from pretraining.model.dropout import Dropout
from pretraining.processes.group import choose_device
from pretraining.reporting.hardware import measure_seconds, synchronize

CALLS, ROUNDS = 200, 10
"""Launches before one waits for the GPU, whose queue holds more; and how often."""
REPEATS = 8
"""Products before one waits: the clock needs something to measure."""


class _Double(torch.autograd.Function):
    """The smallest function of autograd."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x + x

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad + grad


def measure_calls(device: torch.device, work: Callable[[], object]) -> float:
    """Measures the median microseconds that the host needs for a call; it does not wait for the GPU meanwhile."""
    found = []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        found.append(time.perf_counter() - start)
    synchronize(device)
    return round(1e6 * median(found[1:]) / CALLS, 2)


def measure_host(dry: bool) -> dict[str, float]:  # noqa: ARG001
    """Measures the microseconds of the host for a launch in four ways; without Triton or a GPU in three."""
    device = choose_device("auto", World())
    x, double = torch.zeros(16, 64, device=device), cast(Any, _Double.apply)
    weight, learns = torch.zeros(64, 64, device=device), torch.zeros(16, 64, device=device, requires_grad=True)
    works: dict[str, Callable[[], object]] = {
        "a bare launch": lambda: x.add_(1),
        "F.linear": lambda: F.linear(x, weight),
        "an autograd function, forward and backward": lambda: double(learns).backward(x),
    }
    if device.type == "cuda" and find_spec("triton"):
        kernels = import_module("pretraining.model.gpu_kernels")
        row = x.to(torch.bfloat16)
        works["a Triton launch"] = lambda: kernels.gelu_forward(row, row[0], False)
    return {name: measure_calls(device, work) for name, work in works.items()}


def measure_attention(shards: Path, dry: bool) -> dict[str, float]:
    """Measures nanoseconds of attention a piece by each kernel, on batches of real lengths."""
    found = dict[str, float]()
    for name in ("tiny-128-4",) if dry else ("large-128-1024", "large-512-256"):
        shape, read = Contest.parse(name).open(shards)
        for choice in ("flash", "own"):
            gpu_layouts.choose(choice)
            for what, seconds in time_attention(shape.hidden, shape.heads, read(0)).items():
                found[f"{name}, {choice}, {what}"] = round(seconds, 1)
    return found


def time_attention(hidden: int, heads: int, batch: PretrainingBatch) -> dict[str, float]:
    """Times the chosen kernels of attention on a batch, forward and with the gradients."""
    device = choose_device("auto", World())
    dtype, batch = choose_dtype("auto", device), batch.to(device)
    pieces = len(batch.pieces)
    qkv, bias = (torch.randn(*rows, 3 * hidden, device=device, dtype=dtype) for rows in ((pieces,), ()))
    grad = torch.randn(pieces, hidden, device=device, dtype=dtype)
    dropout = Dropout(0.1, torch.arange(pieces, dtype=torch.int32, device=device))
    layout = lay_out(batch.starts, batch.lengths, grad, heads)
    attend, leaves = layout.attends_sums(grad) or layout.attend, (qkv.requires_grad_(), bias.requires_grad_())

    def attend_both_ways() -> None:
        torch.autograd.grad(attend(*leaves, heads, dropout), leaves, grad)

    works = {"forward": lambda: attend(*leaves, heads, dropout), "forward and backward": attend_both_ways}
    return {what: 1e9 * measure_seconds(device, work, 1.0) / pieces for what, work in works.items()}


def measure_fp8(dry: bool) -> dict[str, float]:
    """Measures TFLOP/s of the four products of a layer of large in three directions, in bf16 and in FP8 whose numbers
    are converted already."""
    pieces, hidden = (256, 64) if dry else (98304, 1024)
    wide, found = 4 * hidden, dict[str, float]()
    sizes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "up": (hidden, wide), "down": (wide, hidden)}
    for name, (inner, outer) in sizes.items():
        ways = {"forward": (pieces, inner, outer), "input": (pieces, outer, inner), "weight": (outer, pieces, inner)}
        for way, (rows, along, columns) in ways.items():
            for kind, seconds in time_product(rows, along, columns).items():
                found[f"{name}, {way}, {kind}"] = round(2e-12 * rows * along * columns / seconds, 2)
    return found


def time_product(rows: int, along: int, columns: int) -> dict[str, float]:
    """Times a product in bf16 and in FP8, which adds up in the fast way."""
    device = choose_device("auto", World())
    one = torch.ones((), device=device)
    left, right = (torch.randn(each, along, device=device, dtype=torch.bfloat16) for each in (rows, columns))
    small, turned = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()

    def multiply() -> None:
        for _ in range(REPEATS):
            F.linear(left, right)

    def multiply_in_fp8() -> None:
        for _ in range(REPEATS):
            torch._scaled_mm(small, turned, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    works = {"bf16": multiply, "fp8": multiply_in_fp8}
    return {kind: measure_seconds(device, work, 0.1) / REPEATS for kind, work in works.items()}
