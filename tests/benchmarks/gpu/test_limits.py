"""A command that hangs loses its time and nothing else: no process of it goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.gpu import run
from benchmarks.gpu.run import run_limited

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
)
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
print(child.pid, flush=True)
time.sleep(300)
"""

TELLS = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
RUNNER = """
import signal, sys
from benchmarks.gpu.run import run_limited
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
say = lambda line: print(line, flush=True)
"""


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_command_that_hangs_ends_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PATIENCE", 1.0)
    lines: list[str] = []
    ending = run_limited([sys.executable, "-c", PARENT], 5, lines.append)
    assert ending == "ran out of time"
    assert "deaf" in lines  # what it said until then is not lost
    [child] = [int(line) for line in lines if line.isdigit()]
    assert not runs(child)


def test_what_a_command_leaves_behind_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PATIENCE", 1.0)
    lines: list[str] = []
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL).pid)"
    assert run_limited([sys.executable, "-c", leaves], 60, lines.append) == "done"
    assert not runs(int(lines[0]))


def test_a_command_does_not_outlive_who_runs_it() -> None:
    code = f"{RUNNER}run_limited([sys.executable, '-c', {TELLS!r}], 300, say)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        command = int(runner.stdout.readline())
        assert runs(command)
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) == 143
    deadline = time.monotonic() + 10
    while runs(command) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(command)
