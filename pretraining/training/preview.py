"""Plans a run without training it, for `train.py --check`."""

from __future__ import annotations

from dataclasses import replace

import torch

from data_prep.shards import Manifest
from pretraining.config.settings import Recipe
from pretraining.devices import find_kind
from pretraining.engine.precision import DTYPES, choose_dtype, explain_slowness, name_dtype
from pretraining.planning.memory import Room
from pretraining.planning.plan import Plan, Target, build_plan
from pretraining.reporting.hardware import measure_flops
from pretraining.training.micro_batch import measure_room


def plan_run(
    recipe: Recipe,
    manifest: Manifest | None,
    ranks: int,
    pieces_per_second: float | None = None,
    gpu_memory: float | None = None,
    here: bool = True,
) -> Plan:
    """Plans a run whose GPUs nobody has named. Its hours follow from a given throughput, or from the measured FLOP/s of
    this machine.

    `gpu_memory`, in GB: plan for other GPUs with this memory. `here`: plan for this machine, so that its measured speed
    counts.
    """
    device = torch.device("cpu" if recipe.parallel.device == "cpu" else find_kind())
    elsewhere = device.type == "cpu" and (gpu_memory is not None or not here)
    dtype, measured = recipe.precision.dtype, recipe.logging.peak_flops
    if dtype == "auto":
        dtype = "bf16" if elsewhere and gpu_memory else name_dtype(choose_dtype(dtype, device))
    can_run_here = recipe.parallel.device in ("auto", device.type) and not (dtype == "fp16" and device.type == "cpu")
    slowness = None
    if can_run_here and not elsewhere:
        slowness = explain_slowness(recipe.precision.dtype, device)
        if measured is None and pieces_per_second is None:
            measured = measure_flops(device, DTYPES[dtype])
    room = measure_room(device, ranks * recipe.parallel.tensor) if gpu_memory is None else Room(1e9 * gpu_memory)
    target = Target(recipe, manifest, dtype, room, ranks, notes=(slowness,) if slowness else ())
    return build_plan(replace(target, pieces_per_second=pieces_per_second, flops_per_second=measured))
