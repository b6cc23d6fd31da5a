#!/usr/bin/env python3
"""Compares a layer's products in FP8 with those in bf16, with what it costs to round to eight bits.

    python benchmarks/gpu/eight_bits.py
    python benchmarks/gpu/eight_bits.py --widths 768 1024 4096

A layer has four products, each with one forward and two backward: the gradients of its input and of its weight. In FP8
each takes two tensors that were rounded to eight bits by a scale of their own, from their largest value, and the
gradients need some of them transposed. `rounded before` leaves that work out: it is what a perfect fusion would reach.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.contests import Turns, alternate
from benchmarks.measure import run_command, write_results
from benchmarks.tables import ResultTable, matrix, show
from data_prep.common.errors import UserError
from pretraining.devices import can_translate, explain_no_fp8, find_kind
from pretraining.reporting.hardware import synchronize

PRODUCTS = {"q, k, v": (1, 3), "output": (1, 1), "up": (1, 4), "down": (4, 1)}
"""The products of a layer: how many times its width they take, and give."""
ROUNDS, WARM_UP, REPEATS = 15, 3, 20
BF16, FP8, BEFORE = "bf16", "FP8", "FP8, rounded before"


@dataclass(frozen=True)
class EightBits:
    """Compares products in FP8 with those in bf16."""

    widths: tuple[int, ...] = (768, 1024)
    """Sizes of the hidden states: those of base and large."""
    pieces: int = 16_384
    """Rows of the products."""
    out: Path | None = None
    """File for what was measured."""


class Eight(NamedTuple):
    """A tensor in eight bits, and the number that its values are multiplied by."""

    values: Tensor
    scale: Tensor


class Operands(NamedTuple):
    """What a product works on, in its three directions: rows and columns as they lie in memory."""

    given: Any
    weight: Any
    gradient: Any


def rounded(tensor: Tensor, kind: torch.dtype) -> Eight:
    """The tensor in eight bits, its largest value the largest that they have."""
    scale = tensor.abs().amax().float() / torch.finfo(kind).max
    return Eight((tensor / scale).to(kind), scale)


def turned(tensor: Eight) -> Eight:
    """The same, with rows and columns swapped in memory."""
    return Eight(tensor.values.t().contiguous(), tensor.scale)


def multiply(left: Eight, right: Eight, roughly: bool = False) -> Tensor:
    """left · rightᵀ, in bf16; both lie in memory row by row, which is all that the kernels take.

    `roughly` lets the GPU add up in fewer digits, which is faster.
    """
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=roughly,
    )


def round_all(operands: Operands) -> tuple[Operands, Operands]:
    """The operands in eight bits, and turned: with gradients go more of the exponent and fewer digits."""
    given, weight = (rounded(each, torch.float8_e4m3fn) for each in (operands.given, operands.weight))
    straight = Operands(given, weight, rounded(operands.gradient, torch.float8_e5m2))
    return straight, Operands(*map(turned, straight))


def products_in_fp8(straight: Operands, across: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The result, added up roughly as recipes for FP8 have it, and the gradients of the input and of the weight."""
    return (
        multiply(straight.given, straight.weight, roughly=straight.given.values.is_cuda),
        multiply(straight.gradient, across.weight),
        multiply(across.gradient, across.given),
    )


def products_in_bf16(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The same of numbers in bf16."""
    given, weight, gradient = operands
    return given @ weight.t(), gradient @ weight, gradient.t() @ given


def make_operands(pieces: int, width: int, product: str, device: torch.device) -> Operands:
    """Random operands of a product of a layer."""
    inner, outer = (width * times for times in PRODUCTS[product])
    shapes = ((pieces, inner), (outer, inner), (pieces, outer))
    return Operands(*(torch.randn(shape, device=device).bfloat16() for shape in shapes))


def error_of(operands: Operands) -> float:
    """How far products in FP8 are from those in bf16, relative: the furthest of the three."""
    pairs = zip(products_in_fp8(*round_all(operands)), products_in_bf16(operands), strict=True)
    return max(float((found.float() - wanted.float()).norm() / wanted.float().norm()) for found, wanted in pairs)


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """The seconds of some work on the device, which a GPU does again and again while the host runs ahead."""
    times = REPEATS if device.type == "cuda" else 1
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / times


def compare(operands: Operands, device: torch.device) -> Turns:
    """Turns of products in bf16, in FP8 with the rounding, which is compiled where it can be, and without it."""
    torch.compiler.reset()  # it would give up after some shapes
    rounding = torch.compile(round_all) if can_translate() else round_all
    ready = round_all(operands)
    works = {
        BF16: lambda: products_in_bf16(operands),
        FP8: lambda: products_in_fp8(*rounding(operands)),
        BEFORE: lambda: products_in_fp8(*ready),
    }
    return alternate({name: partial(timed, device, work) for name, work in works.items()}, ROUNDS, WARM_UP)


def of_width(width: int, pieces: int, device: torch.device) -> dict[str, Any]:
    """What the products of a layer of this width take, each and together."""
    found: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {}
    for name in PRODUCTS:
        operands = make_operands(pieces, width, name, device)
        turns = compare(operands, device)
        for side, own in turns.seconds.items():
            seconds[side] = [a + b for a, b in zip(seconds.get(side, [0.0] * ROUNDS), own, strict=True)]
        found[name] = {**ratios(turns), "error": round(error_of(operands), 4)}
    whole = Turns(seconds)
    flops = 6.0 * pieces * width * width * sum(inner * outer for inner, outer in PRODUCTS.values())
    rates = {f"{side}_tflops": round(flops / median(own) / 1e12, 3) for side, own in seconds.items()}
    return {"products": found, "layer": {**ratios(whole), **rates}}


def ratios(turns: Turns) -> dict[str, Any]:
    """How many times as fast as bf16 the others are."""
    return {"times_as_fast": {side: turns.ratio(BF16, side) for side in (FP8, BEFORE)}}


def as_table(found: Mapping[str, Any]) -> ResultTable:
    """How many times as fast as bf16, for each product and for a layer."""
    rows = []
    for width, each in found.items():
        for name, product in (*each["products"].items(), ("the layer", each["layer"])):
            times = {f"{side}: times": f"{ratio['median']:.2f}" for side, ratio in product["times_as_fast"].items()}
            rows.append({"width": width, "product": name, **times, "error": product.get("error", "")})
    return matrix("As fast as bf16, forward and backward", rows)


def measure(settings: EightBits, console: Console) -> None:
    """Compares the products of layers of all widths, and says and keeps what was found."""
    if any(width % 16 or width < 16 for width in settings.widths) or settings.pieces % 16 or settings.pieces < 16:
        raise UserError("--widths and --pieces: multiples of 16, which products in FP8 need")
    device = torch.device(find_kind())
    absent = explain_no_fp8(device)
    if absent:
        console.print(absent)
        found: dict[str, Any] = {"absent": absent}
    else:
        found = {str(width): of_width(width, settings.pieces, device) for width in settings.widths}
        show(console, [as_table(found)])
    if settings.out is not None:
        write_results(settings.out, {"pieces": settings.pieces, "widths": found})


if __name__ == "__main__":
    run_command(EightBits, measure)
