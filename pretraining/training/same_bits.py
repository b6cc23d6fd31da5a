"""What a run with `parallel.same_bits` keeps from start to start, since its bits depend on it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from data_prep.common.errors import SharedError
from data_prep.common.toml_text import show_value
from pretraining.checkpoint.state import Saved
from pretraining.devices import read_name
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model import cpu_kernels
from pretraining.processes import group
from pretraining.processes.context import Context
from pretraining.training.request import Request

CURES = {
    "threads of a rank": "give --compute.threads {}",
    "precision.dtype": "give --precision.dtype {}",
    "kernels": "start on such a device, with the same compiler and CXX",
    "torch": "go on with that version",
}
"""The cure for each condition that has changed, by its name in a checkpoint."""


def find_kept(latest: Saved | None, request: Request) -> dict[str, Any] | None:
    """Finds what the last start with `same_bits` wrote down; None where bits begin to be the same from here."""
    return latest.run.same_bits if latest is not None and request.recipe.parallel.same_bits else None


def choose_threads(latest: Saved | None, request: Request, context: Context) -> int:
    """Chooses the threads of a rank on a CPU: those of the recipe, those that the run keeps, or as many as there are
    cores for; warns where the run keeps more than these."""
    default = group.default_threads(context.world)
    kept: int = (find_kept(latest, request) or {}).get("threads of a rank") or default
    if kept > default and context.world.rank == 0:
        context.warn(f"parallel.same_bits keeps the first start's {kept} threads a rank; cores are for {default}")
    return request.recipe.compute.threads or kept


def describe_conditions(request: Request, context: Context) -> dict[str, Any] | None:
    """Describes what the bits of a run depend on besides its recipe; None without `same_bits`."""
    if not request.recipe.parallel.same_bits:
        return None
    device, on_cpu = context.device, context.device.type == "cpu"
    lines = Path("/proc/cpuinfo").read_text().splitlines()  # libraries choose their ways by vendor and capability
    maker = next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), platform.machine())
    ours = f"{cpu_kernels.describe_arithmetic()}, {cpu_kernels.vector_bits()} bits"
    kernels = f"{ours}, {torch.backends.cpu.get_cpu_capability()}, {maker}"
    return {
        "kernels": kernels if on_cpu else read_name(device),  # first: on another device, all else differs too
        "threads of a rank": torch.get_num_threads() if on_cpu else 0,
        "precision.dtype": name_dtype(choose_dtype(request.recipe.precision.dtype, device)),
        "torch": torch.__version__,
    }


def require_same_conditions(latest: Saved | None, request: Request, context: Context) -> None:
    """Raises SharedError if the bits of the run would not be those of its other starts, or of other ranks. All ranks
    call it together, when this process computes as it will."""
    now = describe_conditions(request, context)
    if now is None:
        return
    fault = "parallel.same_bits = true: "
    first, *others = group.gather(now)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise SharedError(f"{fault}{name}: {value} on rank 0, {other[name]} on rank {rank}; take one for all")
    if (kept := find_kept(latest, request)) is None or latest is None:
        return
    for name, value in now.items():
        if kept[name] != value:
            cure = CURES[name].format(kept[name])
            raise SharedError(f"{fault}{name} was {kept[name]}, now {value}; {cure}, or --parallel.same_bits false")
    run, phases = latest.run, request.recipe.phases
    for number in range(run.state.phase, min(len(phases), len(run.recipe.phases))):
        before, here = run.recipe.phases[number], phases[number]
        found = run.micro_batches.get(before.name)
        same = {before.micro_batch, found.sequences if found and before.micro_batch == "auto" else before.micro_batch}
        if before.name == here.name and here.micro_batch not in same:
            given = f"phases.{number}.micro_batch"
            raise SharedError(
                f"{fault}{given} was {before.micro_batch}, now {here.micro_batch}; give --{given} "
                f"{show_value(before.micro_batch)}, or --parallel.same_bits false"
            )
