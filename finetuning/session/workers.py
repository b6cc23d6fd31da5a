"""Runs side by side: how many a machine has room for, and the processes that take them, the same command again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from data_prep.common.capacity import num_cores
from data_prep.common.launchers import World
from data_prep.common.locks import LOCK as LOCK
from data_prep.common.locks import HeldError, locked
from data_prep.common.supervision import end_with_parent
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
"""Bytes that a process takes besides its model: Python, PyTorch, the texts of a task."""
LOOK_SECONDS = 0.2
"""For how long it is watched how busy the machine is."""
NUMBER, JOBS = "CLOZE_WORKER", "CLOZE_JOBS"
"""Variables that tell a worker which one it is, from 1 on, and how many processes there are with the first."""
BUSY = "{owner} is at work in this folder\nwait for its end, or name another folder with --out"
"""What is said of a folder in which another process is at work."""
PATIENCE = 300.0 if "SLURM_RESTART_COUNT" in os.environ else 120.0
"""Seconds in which a worker that was asked to stop saves. In a job that Slurm has begun again, the last start may be at
work on a machine that was cut off, and finds that out late."""


def get_worker_number() -> int:
    """Which worker this process is; 0 for the one that the user started."""
    return int(os.environ.get(NUMBER, 0))


class RunProcesses:
    """The workers of a command, which live no longer than it does."""

    def __init__(self, jobs: int, device: torch.device, environment: Mapping[str, str]) -> None:
        """`environment` is that of this process before it met its ranks."""
        self._jobs = 1 if get_worker_number() else jobs
        self._device, self._environment = device, environment
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RunProcesses:
        for number in range(1, self._jobs):
            environment = {**self._environment, NUMBER: str(number), JOBS: str(self._jobs)}
            if self._device.type == "cuda":
                seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
                devices = seen.split(",")
                environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
            command = [sys.executable, *sys.argv]
            self._processes.append(subprocess.Popen(command, env=environment, preexec_fn=end_with_parent))
        return self

    def wait(self, control: Control) -> None:
        """Waits until the workers have nothing left to do, or were killed."""
        while any(process.poll() is None for process in self._processes):
            pause(control)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)


@contextmanager
def take_run(folder: Path, waits: Control | None = None) -> Iterator[bool]:
    """Takes a run for this process; False where another one has it.

    A process that `waits`, until it is asked to stop, has patience with a worker whose command was killed, and which
    saves yet; HeldError where the other one goes on.
    """
    until = time.monotonic() + PATIENCE
    with ExitStack() as stack:
        while True:
            try:
                protected = stack.enter_context(locked(folder / LOCK, str(folder), BUSY))
            except HeldError:
                if waits is None:
                    yield False
                    return
                if time.monotonic() > until:
                    raise
                pause(waits)
            else:
                break
        yield protected or not get_worker_number()  # on a file system without locks, the first process does all


def pause(control: Control) -> None:
    """Waits for a moment, in which a command may be asked to stop."""
    if control.stop_requested:
        decision = control.decide(wrong=False, saving=0.0)
        raise StoppedError(f"stopped by {decision.cause}; the same command continues", decision)
    time.sleep(0.1)


@dataclass(frozen=True)
class MachineShare:
    """How runs share a machine."""

    jobs: int
    """Runs at a time."""
    threads: int
    """Threads of each, which decide how its sums are rounded."""


def share_machine(
    settings: FineTuning, world: World, device: torch.device, runs: int, left: int, memory: float
) -> MachineShare:
    """Shares a machine among runs that take so much `memory` each, of which some are `left` to do. Without a launcher
    they go side by side. All ranks call it together.

    Threads follow from the command and the machine alone, so that a command computes the same bits again. How many runs
    go at a time depends also on what is left to do, and on the memory and the cores that others leave free now.
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
    if get_worker_number():
        return MachineShare(int(os.environ[JOBS]), threads)
    jobs = min(most, left)
    if wanted == "auto" and device.type == "cpu":
        free = min(read_total_memory(device), psutil.virtual_memory().available)
        jobs = min(jobs, int(free // memory), count_idle_cores() // threads)
    return MachineShare(max(1, jobs), threads)


def count_idle_cores() -> int:
    """Cores of the machine that nobody uses now. (A load average would still count a command that was just stopped.)"""
    busy: float = psutil.cpu_percent(LOOK_SECONDS) / 100
    return round((os.cpu_count() or 1) * (1 - busy))


def estimate_memory(task: Task, settings: FineTuning, shape: Shape, device: torch.device) -> float:
    """Bytes that a run takes, an estimate: weights twice, gradients, averages, activations, the process."""
    dtype = name_dtype(choose_dtype(settings.precision.dtype, device))
    items = min(settings.micro_batch or settings.batch, settings.batch)
    sequences = items * task.train.encode(np.arange(1)).choices
    on_gpu = device.type == "cuda"
    full = plan_activations(
        shape, dtype, sequences, settings.length, on_gpu, seen=settings.length
    )  # as spans and tags do
    activations = full.recomputed if settings.compute.checkpoint_activations else full.kept
    state = plan_memory(shape, dtype, 1, settings.parallel.zero, optimizer=find_optimizer(settings.optimizer)).device
    return PROCESS + 4 * num_parameters(shape) + state + activations
