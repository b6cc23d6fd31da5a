"""Commands that a benchmark starts are read to their end, and end with all that they started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import has_ended, wait_for

from benchmarks import processes

SAVES = """
import signal, sys, time
def save(*_):
    print("saved\\n" * 50_000, "at the end")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
while True:
    time.sleep(0.1)  # pause() would miss a signal that comes just before it
"""


def test_a_run_that_is_interrupted_says_all_that_it_has_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds, so that it would wait for ever for a reader."""
    monkeypatch.setattr(processes, "SAVING", 60.0)

    def interrupt(line: str) -> None:
        if line == "begun":
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        processes.follow([sys.executable, "-c", SAVES], tmp_path / "log", interrupt)
    signal.signal(signal.SIGINT, before)
    lines = (tmp_path / "log").read_text().split("\n")
    assert (lines[0], lines[-2].strip()) == ("begun", "at the end")


@pytest.mark.timeout(60)
def test_a_full_disk_ends_a_command_that_has_much_to_say() -> None:
    with pytest.raises(OSError, match="No space left"):
        processes.follow([sys.executable, "-c", "while True: print('more')"], Path("/dev/full"), print)


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
LEAVES = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid)"
TELLS = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
RUNNER = f"""
import signal, sys
from benchmarks.processes import Child
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
child = Child([sys.executable, "-c", {TELLS!r}], lambda line: print(line, flush=True))
try:
    child.wait(300)
finally:
    child.end()
"""


def test_what_a_command_leaves_behind_ends_with_it_however_stubborn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 1.0)
    lines: list[str] = []
    child = processes.Child([sys.executable, "-c", LEAVES], lines.append)
    assert child.wait(60) == 0
    child.end()
    assert has_ended(int(lines[0]))


def test_a_command_does_not_outlive_who_runs_it() -> None:
    with subprocess.Popen([sys.executable, "-c", RUNNER], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        command = int(runner.stdout.readline())
        assert not has_ended(command)
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) == 143
    wait_for(lambda: has_ended(command), 10)
