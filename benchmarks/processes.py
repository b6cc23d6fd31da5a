"""Commands that a benchmark starts, and ends with all of their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from data_prep.common.supervision import end_with_parent

PATIENCE = 10.0
"""Seconds that processes have to end after a request."""
SAVING = 120.0
"""The same for a run that saves first."""


@contextmanager
def pin_to_one_core() -> Iterator[None]:
    """Pins this process to one core within the context."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts a command in a session of its own, with its output in one pipe. It ends with this process."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def pass_on(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Passes all lines of a process to `say`, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip("\n"))


def follow(
    command: Sequence[str], log: Path, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> int:
    """Runs a command, and returns its exit code. Its lines are appended to a log, and go to `say`. A Ctrl-C asks the
    command to save and stop, and is raised when it has ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = start(command, environment)
    assert process.stdout is not None
    try:
        with log.open("a") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                say(line.rstrip("\n"))
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        with suppress(subprocess.TimeoutExpired), log.open("a") as file:
            file.write(process.communicate(timeout=SAVING)[0])  # read to the end: a full pipe would block it
        raise
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[str]) -> None:
    """Ends a process and all that it has started: by a request, then by a kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            process.poll()  # until its code is read, it stays in the group
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
