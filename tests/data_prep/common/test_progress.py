"""The line of a step says how far it is and how fast, also where it is slow or one task takes long."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from data_prep.common import progress
from data_prep.common.progress import StepProgress


def line(monkeypatch: pytest.MonkeyPatch, done: int, seconds: float) -> str:
    """What the line says where so much of a step is done after so many seconds."""
    step = StepProgress(Console(), "near copies", "documents", 10**9, 0)
    step.advance(done, 0)
    start = time.monotonic()
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: start + seconds)
        return " ".join(str(step.line()).split())


def test_a_slow_rate_is_no_rate_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "40 documents 0.5 documents/s" in line(monkeypatch, 40, 80)
    assert "90,000 documents 9,000 documents/s" in line(monkeypatch, 90_000, 10)
    assert "12.0 Mdocuments 1.2 Mdocuments/s" in line(monkeypatch, 12_000_000, 10)


def test_a_step_of_one_long_task_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.02)
    text = io.StringIO()
    with StepProgress(Console(file=text), "documents", "B", 100, 0).show():
        time.sleep(0.3)
        lines = text.getvalue().splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"documents +0%  .* for [\d.]+ s now", line.rstrip()) for line in lines)
