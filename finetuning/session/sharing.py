"""How the runs of a command share a machine: how many at a time, with how many threads each, by cores and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from data_prep.common.capacity import num_cores
from data_prep.common.launchers import World
from finetuning.session.workers import JOBS, worker_number
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import num_parameters
from pretraining.optimizers.declaration import find_optimizer
from pretraining.planning.memory import plan_activations, plan_memory
from pretraining.processes.group import default_threads
from pretraining.reporting.hardware import total_memory

PROCESS = 1.5e9
"""Bytes that a process takes besides its model: Python, PyTorch, the texts of a task."""
LOOK_SECONDS = 0.2
"""For how long it is watched how busy the machine is."""


@dataclass(frozen=True)
class Sharing:
    """How runs share a machine."""

    jobs: int
    """Runs at a time."""
    threads: int
    """Threads of each, which decide how its sums are rounded."""


def share_machine(
    settings: FineTuning, world: World, device: torch.device, runs: int, left: int, memory: float
) -> Sharing:
    """Shares a machine among runs that take so much `memory` each, of which some are `left` to do. Without a launcher
    they go side by side. All ranks call it together.

    Threads follow from the command and the machine alone, so that a command computes the same bits again. How many runs
    go at a time depends also on what is left to do, and on the memory and the cores that others leave free now.
    """
    wanted, threads = settings.search.jobs, default_threads(world)
    if world.launcher != "plain":
        return Sharing(1, settings.compute.threads or threads)
    if device.type == "cuda":
        places = torch.cuda.device_count()
    else:
        places = min(num_cores(), int(total_memory(device) // memory))
    most = max(1, min(places if wanted == "auto" else wanted, runs))
    threads = settings.compute.threads or max(1, threads // most)
    if worker_number():
        return Sharing(int(os.environ[JOBS]), threads)
    jobs = min(most, left)
    if wanted == "auto" and device.type == "cpu":
        free = min(total_memory(device), psutil.virtual_memory().available)
        jobs = min(jobs, int(free // memory), idle_cores() // threads)
    return Sharing(max(1, jobs), threads)


def idle_cores() -> int:
    """Cores of the machine that nobody uses now. (A load average would still count a command that was just stopped.)"""
    busy: float = psutil.cpu_percent(LOOK_SECONDS) / 100
    return round((os.cpu_count() or 1) * (1 - busy))


def memory_of_run(task: Task, settings: FineTuning, shape: Shape, device: torch.device) -> float:
    """Bytes that a run takes, an estimate: weights twice, gradients, averages, activations, the process."""
    dtype = name_dtype(choose_dtype(settings.precision.dtype, device))
    items = min(settings.micro_batch or settings.batch, settings.batch)
    sequences = items * task.train.encode(np.arange(1)).choices
    full = plan_activations(shape, dtype, sequences, settings.length, fused_attention=device.type == "cuda")
    activations = full.recomputed if settings.compute.checkpoint_activations else full.kept
    state = plan_memory(shape, dtype, 1, settings.parallel.zero, optimizer=find_optimizer(settings.optimizer)).device
    return PROCESS + 4 * num_parameters(shape) + state + activations
