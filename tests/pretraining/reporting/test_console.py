"""Lines that one can read, in a file and in a terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.records import RECORD, SCORES, open_log

from pretraining.reporting.console import format_number
from pretraining.reporting.records import describe_progress


def test_a_line_a_step(tmp_path: Path) -> None:
    output = io.StringIO()
    with open_log(tmp_path, Console(file=output, width=80)) as log:
        log.write(RECORD)
        log.write(SCORES)
    step, scores = output.getvalue().splitlines()
    assert step == RECORD.line()
    assert len(step) <= 165
    assert "12000/900000  loss 6.5321  masked 5.8420 12.3%  next 0.6901 55.1% (larger class 51.3%)" in step
    assert step.endswith("123k pieces/s  use 61%  wait 0%  2 h 03 m left")
    assert scores.startswith(
        "validation 12000: masked 5.8000 12.0%  perplexity 330.30  next 0.6900 55.0% (larger class 52.0%)"
    )


def test_lines_of_progress_come_ever_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, and then where nothing was printed for 5 seconds, 10, 20, 40, and at last for a minute."""
    output, now = io.StringIO(), 1000.0
    monkeypatch.setattr("pretraining.reporting.run_log.time", SimpleNamespace(time=time.time, monotonic=lambda: now))
    with open_log(tmp_path, Console(file=output)) as log:
        log.show(describe_progress(0, 300, 10, None, None))  # nothing is known yet
        for second in range(1, 301):
            now = 1000.0 + second
            log.show(describe_progress(second, 300, 10, 12_345.0, 75.0))
            if second == 200:
                log.write(RECORD)  # a line too
    lines = output.getvalue().splitlines()
    assert lines[0] == "  1/300  12.3k pieces/s  1 m 15 s left  losses follow at step 10"
    steps = [int(line.partition("/")[0]) for line in lines]
    assert steps == [1, 6, 16, 36, 76, 136, 196, 12000, 260]


def test_numbers_as_people_read_them() -> None:
    numbers = {7.4: "7", 999: "999", 12345: "12.3k", 4.561e6: "4.56M", 123.4e9: "123G"}
    assert [*map(format_number, numbers)] == [*numbers.values()]
