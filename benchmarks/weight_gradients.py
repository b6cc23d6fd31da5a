#!/usr/bin/env python3
"""Measures on this processor whether the gradient of a weight is made sooner where an operand is turned around first.

    python benchmarks/weight_gradients.py
    python benchmarks/weight_gradients.py --rows 1664 --threads 1

For the weights of mini, small, base and large: the time of the product as it is, by turning the narrower operand first,
and by a kernel's turning alone; shares are those of a square product that takes turns with them. `turned` marks
what `pretraining/model/products.py` takes. The numbers are kept in benchmarks/results/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.contests import alternate
from benchmarks.measure import FORMAT, environment, results_file, run_command, write_results
from benchmarks.tables import matrix, show
from data_prep.common.errors import UserError
from pretraining.model import cpu_kernels
from pretraining.model.products import pays, turned
from pretraining.model.shape import Shape

SIZES_HERE = ("mini", "small", "base", "large")
SIDE, WARM_UP = 2048, 1


@dataclass(frozen=True)
class WeightGradients:
    """Measures how gradients of weights are made soonest."""

    rows: tuple[int, ...] = (800, 1664, 6144)
    """Pieces of a micro-batch."""
    threads: int = torch.get_num_threads()
    """Threads that multiply."""
    rounds: int = 15
    """Alternating runs of which the median is taken."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""


def weights() -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of the weights of all sizes, each once."""
    found = []
    for name in SIZES_HERE:
        h, wide = Shape.named(name, 1).hidden, Shape.named(name, 1).intermediate
        found += [(3 * h, h), (h, h), (wide, h), (h, wide)]
    yield from dict.fromkeys(found)


def by_turning(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient, by turning the narrower operand first."""
    return turned(grad) @ x if grad.shape[1] <= x.shape[1] else turned(turned(x) @ grad)


def compare(rows: int, outputs: int, inputs: int, rounds: int) -> dict[str, Any]:
    """The ways for a weight, as a row of the table."""
    square, grad, x = (torch.randn(shape).bfloat16() for shape in ((SIDE, SIDE), (rows, outputs), (rows, inputs)))
    narrow = min(grad, x, key=lambda each: each.shape[1])
    ways: dict[str, Callable[[], object]] = {
        "square": lambda: square @ square,
        "plain": lambda: grad.t() @ x,
        "turned": lambda: by_turning(grad, x),
        "turning": lambda: turned(narrow),
    }
    turns = alternate(ways, rounds, WARM_UP)
    taken = {name: statistics.median(seconds) for name, seconds in turns.seconds.items()}
    ideal = taken["square"] * rows * outputs * inputs / SIDE**3
    return {
        "rows": rows,
        "outputs": outputs,
        "inputs": inputs,
        **{f"{name}_ms": round(1e3 * taken[name], 2) for name in ("plain", "turned", "turning")},
        **{f"{name}_share": round(ideal / taken[name], 2) for name in ("plain", "turned")},
        "taken": "turned" if cpu_kernels.small_products() and pays(rows, outputs, inputs) else "plain",
    }


def measure(settings: WeightGradients, console: Console) -> None:
    """Measures, and prints the table."""
    if settings.rounds < 1 or settings.threads < 1 or min(settings.rows, default=0) < 1:
        raise UserError("--rounds, --threads and --rows from 1 on")
    if not cpu_kernels.usable(torch.empty(0, dtype=torch.bfloat16)):
        raise UserError("our kernels cannot be built here; install g++")
    torch.set_num_threads(settings.threads)
    found = [compare(n, o, i, settings.rounds) for n in settings.rows for o, i in weights()]
    show(console, [matrix(f"Gradients of weights on {settings.threads} threads", found)])
    if cpu_kernels.small_products() is None:
        console.print("no bf16 in this processor, or no compiler that knows it: the plain product is taken")
    results = {"format": FORMAT, "benchmark": "weight_gradients", "environment": environment(["torch"])}
    write_results(settings.out or results_file("weight-gradients"), {**results, "rows": found})


if __name__ == "__main__":
    run_command(WeightGradients, measure)
