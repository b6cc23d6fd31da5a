"""Runs a command for a limited time, and leaves no process of it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

PATIENCE = 10.0
"""Seconds that processes have to end by themselves, once they are asked to."""


@dataclass(frozen=True)
class Ending:
    """How a command ended, and when."""

    how: Literal["done", "failed", "ran out of time"]
    seconds: float


def run_limited(
    command: Sequence[str], limit: float, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> Ending:
    """Runs a command with all that it starts for at most `limit` seconds. `say` gets its output, line by line."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=_pass_on, args=(process, say), daemon=True)
    reader.start()
    how: Literal["done", "failed", "ran out of time"]
    try:
        how = "failed" if process.wait(limit) else "done"
    except subprocess.TimeoutExpired:
        how = "ran out of time"
    finally:
        _end_group(process)
        reader.join(PATIENCE)
    return Ending(how, time.monotonic() - start)


def _pass_on(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip("\n"))


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ends the process and all that it has started: first asks, then kills."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            process.poll()  # one that nobody asks for its code stays in the group
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
