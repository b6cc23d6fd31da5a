#!/usr/bin/env python3
"""What a step of LAMB takes beside one of PyTorch's fused AdamW, on the weights of a whole model.

    python benchmarks/optimizers.py --size base

Both move the same flat tensors, as ZeRO hands them over. Steps alternate; the ratio is the median over the rounds.
Kept in benchmarks/results/, in a file for each kind of hardware.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import tyro
from rich.console import Console

from benchmarks.measure import alternate, median_ratio, record, results_file, write_results
from pretraining.config import settings as recipe
from pretraining.engine.adamw import AdamW
from pretraining.engine.lamb import Lamb
from pretraining.engine.optimizers import parameter_groups
from pretraining.engine.partition import FlatTensor, Part
from pretraining.model import cpu_kernels as kernels
from pretraining.model.bert import Bert
from pretraining.model.shape import Shape
from pretraining.processes.group import choose_device, default_threads
from pretraining.processes.launchers import World
from pretraining.reporting.hardware import synchronize


@dataclass(frozen=True)
class Optimizers:
    """Measures optimizer steps."""

    size: str = "base"
    """Which of the published sizes."""
    vocabulary: int = 30_522
    """Pieces of the vocabulary."""
    rounds: int = 15
    """Alternating steps of which the median is taken."""
    out: Path | None = None
    """File for the numbers (default: benchmarks/results/optimizers-<hardware>.json)."""


def make_steps(shape: Shape, device: torch.device) -> dict[str, Callable[[], None]]:
    """A step of each optimizer, on tensors of its own."""
    with torch.device("meta"):
        model = Bert(shape)
    found = {}
    for name, kind in (("adamw", AdamW), ("lamb", Lamb), ("lamb in PyTorch", Lamb)):
        settings = recipe.Optimizer.model_validate({"name": name.split()[0]})
        groups, shares = _flat_groups(model, device)
        optimizer = kind(groups, settings)
        for group in optimizer.param_groups:
            group["lr"] = 1e-4
        if isinstance(optimizer, Lamb):
            optimizer.prepare(shares, Bert.fused_parts)
        found[name] = _stepper(optimizer, device, ours="PyTorch" not in name)
    return found


def _flat_groups(model: Bert, device: torch.device) -> tuple[list[dict[str, Any]], list[FlatTensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups, shares = [], []
    for group in parameter_groups(model):
        sizes = {names[id(each)]: each.numel() for each in group["params"]}
        offsets = [0, *itertools.accumulate(sizes.values())]
        flat = torch.randn(offsets[-1], device=device)
        flat.grad = torch.randn_like(flat)
        parts = [Part(name, 0, size, at) for (name, size), at in zip(sizes.items(), offsets, strict=False)]
        shares.append(FlatTensor(flat, sizes, tuple(parts)))
        groups.append({**group, "params": [flat]})
    return groups, shares


def _stepper(optimizer: AdamW, device: torch.device, ours: bool) -> Callable[[], None]:
    def step() -> None:
        kernels.allow(ours)
        optimizer.step()
        synchronize(device)

    return step


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Optimizers, args=arguments, prog="optimizers.py", config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(highlight=False)
    device = choose_device("auto", World())
    torch.set_num_threads(default_threads(World()))
    shape = Shape.named(settings.size, settings.vocabulary)
    steps = make_steps(shape, device)
    alternate(steps, 3)
    seconds = alternate(steps, settings.rounds).seconds
    ratios = {name: round(median_ratio(times, seconds["adamw"]), 3) for name, times in seconds.items()}
    for name, ratio in ratios.items():
        console.print(f"{name:16} {1000 * statistics.median(seconds[name]):8.1f} ms  {ratio:.2f} times adamw")
    found = {
        "size": settings.size,
        "parameters": shape.num_parameters(),
        "times_fused_adamw": ratios,
        "milliseconds": {name: round(1000 * statistics.median(times), 2) for name, times in seconds.items()},
    }
    results = record("optimizers", ["torch"], found)
    console.print(f"kept in {write_results(settings.out or results_file('optimizers'), results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
