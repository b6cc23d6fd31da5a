"""Runs side by side: how many fit on a machine, and workers, which are the same command again and share its runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from data_prep.common.capacity import num_cores
from data_prep.common.launchers import World
from data_prep.common.locks import LOCK, HeldError, locked
from data_prep.common.supervision import end_with_parent
from finetuning.running.outputs import KEPT_GB
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import num_parameters
from pretraining.optimizers.declaration import find_optimizer
from pretraining.planning.memory import plan_activations, plan_memory
from pretraining.processes.group import default_threads
from pretraining.processes.stopping import Control, StoppedError
from pretraining.reporting.hardware import read_total_memory

PROCESS = 1.5e9
"""Bytes of a process besides its model: Python, PyTorch, the texts of a task."""
JOBS = "CLOZE_JOBS"
"""Environment variable of a worker: the number of processes, with the one that the user started."""
BUSY = "{owner} is at work in this folder\nwait for its end, or name another folder with --out"
"""The message about a folder that another process uses."""
Process = subprocess.Popen[bytes]
PATIENCE = 300.0
"""Seconds that whoever has a run has to save after a stop: in a job that Slurm requeued, the last start may still run
on a machine that lost its network, and notices late."""


def is_worker() -> bool:
    """Whether a command has started this process, to share its runs."""
    return JOBS in os.environ


@contextmanager
def start_workers(jobs: int, device: torch.device, environment: Mapping[str, str]) -> Iterator[list[Process]]:
    """Starts the workers of a command, which end with it; a worker starts none. `environment` is that of this process
    before it connected its ranks."""
    processes: list[Process] = []
    try:
        for number in range(1, 1 if is_worker() else jobs):
            own = {**environment, JOBS: str(jobs)}
            if device.type == "cuda":
                seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
                devices = seen.split(",")
                own["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
            command = [sys.executable, *sys.argv]
            processes.append(subprocess.Popen(command, env=own, preexec_fn=end_with_parent))
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)


def take_run(folder: Path, stack: ExitStack, waits: Control | None) -> bool:
    """Takes a run for this process until the stack is closed; False if another process has it.

    With `waits`, it waits for a worker whose command was killed and which still saves, until asked to stop; HeldError
    if that worker continues.
    """
    patience = (PATIENCE, partial(pause, waits)) if waits else ()
    try:
        protected = stack.enter_context(locked(folder / LOCK, str(folder), BUSY, *patience))
    except HeldError:
        if waits:
            raise
        return False
    return protected or not is_worker()  # on a file system without locks, the first process does all


def pause(control: Control) -> None:
    """Sleeps a moment; StoppedError if the command is asked to stop."""
    if control.stop_requested:
        decision = control.decide(wrong=False, saving=0.0)
        raise StoppedError(f"stopped by {decision.cause}; the same command continues", decision)
    time.sleep(0.1)


class MachineShare(NamedTuple):
    """The share of a machine that each run gets."""

    jobs: int
    """Runs at a time."""
    threads: int
    """Threads of each run; they determine how sums are rounded."""


def share_machine(
    settings: FineTuning, world: World, device: torch.device, runs: int, left: int, memory: float
) -> MachineShare:
    """Divides a machine among runs of this `memory` each, of which some are `left`. Runs go side by side only without a
    launcher. All ranks call it together.

    The number of threads depends on the command and the machine alone, so that results are reproducible. The number of
    runs at a time also depends on the runs left, and on the memory and cores that are free now.
    """
    wanted, threads = settings.search.jobs, default_threads(world)
    if world.launcher != "plain":
        return MachineShare(1, settings.compute.threads or threads)
    if device.type == "cuda":
        places = torch.cuda.device_count()
    else:
        places = min(num_cores(), int(read_total_memory(device) // memory))
    most = max(1, min(places if wanted == "auto" else wanted, runs))
    threads = settings.compute.threads or max(1, threads // most)
    if is_worker():
        return MachineShare(int(os.environ[JOBS]), threads)
    jobs = min(most, left)
    if wanted == "auto" and device.type == "cpu":
        free = min(read_total_memory(device), psutil.virtual_memory().available)
        idle = (os.cpu_count() or 1) * (1 - psutil.cpu_percent(0.2) / 100)  # a load average is late
        jobs = min(jobs, int(free // memory), round(idle) // threads)
    return MachineShare(max(1, jobs), threads)


def estimate_memory(task: Task, settings: FineTuning, shape: Shape, device: torch.device) -> float:
    """Estimates the bytes of a run: weights twice, gradients, averages, activations, the process, and the limit of
    what is kept of frozen encoders."""
    dtype = name_dtype(choose_dtype(settings.precision.dtype, device))
    items = min(settings.micro_batch or settings.batch, settings.batch)
    sequences = items * task.train.encode(np.arange(1)).choices
    on_gpu = device.type == "cuda"
    length = settings.length
    full = plan_activations(shape, dtype, sequences, length, on_gpu, seen=length)  # as spans and tags do
    activations = full.recomputed if settings.compute.checkpoint_activations else full.kept
    state = plan_memory(shape, dtype, 1, settings.parallel.zero, optimizer=find_optimizer(settings.optimizer)).device
    kept = 1e9 * KEPT_GB if settings.features.layers else 0.0
    return PROCESS + 4 * num_parameters(shape) + state + activations + kept
