"""Commands that tests start as a user does at a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep.common.errors import UserError


def start(command: Sequence[str], stdin: int | None = None) -> subprocess.Popen[str]:
    """Starts a command that the signals of a terminal end, even where they do not end the tests.

    Under `nohup make test &` the tests ignore SIGINT and SIGHUP, which children inherit; only a signal that has a
    handler here has its default action in a child.
    """
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_main(main: Callable[[list[str]], int], *words: object, code: int = 0) -> str:
    """Runs a command in this process; returns its output, or of one that ends with code 1 or 2 its errors."""
    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        ended = main([*map(str, words)])
    assert ended == code, output.getvalue() + errors.getvalue()
    return (errors if code in (1, 2) else output).getvalue()


def refusal(act: Callable[..., object], *words: Any, **more: Any) -> str:
    """Calls a function that must refuse; returns what the user is told."""
    with pytest.raises(UserError) as caught:
        act(*words, **more)
    return str(caught.value)


def assert_refusal(match: str, act: Callable[..., object], *words: Any, **more: Any) -> None:
    """Asserts that a function refuses what it is given, and tells the user this, a regular expression."""
    with pytest.raises(UserError, match=match):
        act(*words, **more)


def write_program(path: Path, does: str) -> Path:
    """Writes a program of the shell, which may stand in for another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)
    return path


def has_ended(number: int) -> bool:
    """Tells whether a process is gone."""
    try:
        return bool(psutil.Process(number).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def block_all_signals() -> None:
    """What a starter may leave to a command, before it begins: Slurm 25.05's srun does so with SIGCHLD."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Waits until something holds, and fails where it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started, as a machine that loses its power does."""
    for member in [*psutil.Process(process.pid).children(recursive=True), process]:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
