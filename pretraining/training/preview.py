"""Plans a run without training it, for `train.py --check`."""

from __future__ import annotations

import torch

from pretraining.config.settings import Recipe
from pretraining.data.corpora import Corpora
from pretraining.devices import find_kind
from pretraining.engine.precision import DTYPES, choose_dtype, explain_slowness, name_dtype
from pretraining.planning.plan import Plan, Target, build_plan
from pretraining.reporting.hardware import measure_flops
from pretraining.training.micro_batch import measure_room


def plan_run(recipe: Recipe, corpora: Corpora | None, ranks: int, here: bool = True) -> Plan:
    """Plans a run whose GPUs nobody has named. With `here` it will run on this machine, whose measured speed counts."""
    device = torch.device("cpu" if recipe.parallel.device == "cpu" else find_kind())
    elsewhere = device.type == "cpu" and not here
    dtype, measured = recipe.precision.dtype, recipe.logging.peak_flops
    if dtype == "auto":
        dtype = name_dtype(choose_dtype(dtype, device))
    can_run_here = recipe.parallel.device in ("auto", device.type) and not (dtype == "fp16" and device.type == "cpu")
    slowness = None
    if can_run_here and not elsewhere:
        slowness = explain_slowness(recipe.precision.dtype, device)
        if measured is None:
            measured = measure_flops(device, DTYPES[dtype])
    room = measure_room(device, ranks * recipe.parallel.tensor)
    return build_plan(Target(recipe, corpora, dtype, room, ranks, flops_per_second=measured, note=slowness))
