"""Commands that a benchmark starts are read to their end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks import processes

SAVES = """
import signal, sys
def save(*_):
    print("saved\\n" * 50_000, "at the end")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
signal.pause()
"""


def test_a_run_that_is_interrupted_says_all_that_it_has_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds, so that it would wait for ever for a reader."""
    monkeypatch.setattr(processes, "SAVING", 5.0)

    def interrupt(line: str) -> None:
        if line == "begun":
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        processes.follow([sys.executable, "-c", SAVES], tmp_path / "log", interrupt)
    signal.signal(signal.SIGINT, before)
    lines = (tmp_path / "log").read_text().split("\n")
    assert lines[0] == "begun"
    assert lines[-2].strip() == "at the end"
