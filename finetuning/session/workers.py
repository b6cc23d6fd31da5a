"""Workers: the same command again, in processes that take runs of a search side by side with this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from data_prep.common.locks import LOCK as LOCK
from data_prep.common.locks import HeldError, locked
from data_prep.common.supervision import end_with_parent
from pretraining.processes.stopping import Control, StoppedError

NUMBER, JOBS = "CLOZE_WORKER", "CLOZE_JOBS"
"""Variables that tell a worker which one it is, from 1 on, and how many processes there are with the first."""
BUSY = "{owner} is at work in this folder\nwait for its end, or name another folder with --out"
"""What is said of a folder in which another process is at work."""
PATIENCE = 300.0 if "SLURM_RESTART_COUNT" in os.environ else 120.0
"""Seconds in which a worker that was asked to stop saves. In a job that Slurm has begun again, the last start may be at
work on a machine that was cut off, and finds that out late."""


def worker_number() -> int:
    """Which worker this process is; 0 for the one that the user started."""
    return int(os.environ.get(NUMBER, 0))


class Workers:
    """The workers of a command, which live no longer than it does."""

    def __init__(self, jobs: int, device: torch.device, environment: Mapping[str, str]) -> None:
        """`environment` is that of this process before it met its ranks."""
        self._jobs = 1 if worker_number() else jobs
        self._device, self._environment = device, environment
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Workers:
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
def taken(folder: Path, waits: Control | None = None) -> Iterator[bool]:
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
        yield protected or not worker_number()  # on a file system without locks, the first process does all


def pause(control: Control) -> None:
    """Waits for a moment, in which a command may be asked to stop."""
    if control.asked:
        decision = control.decide(wrong=False, saving=0.0)
        raise StoppedError(f"stopped by {decision.cause}; the same command continues", decision)
    time.sleep(0.1)
