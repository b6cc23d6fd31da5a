"""Lines that one can read, in a file and in a terminal."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.commands import wait_for
from support.records import RECORD, SCORES, open_log

from pretraining.reporting.console import format_number
from pretraining.reporting.records import Progress


def test_a_line_a_step_where_there_is_no_terminal(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_shows_three_lines_that_fit(width: int, tmp_path: Path) -> None:
    output = io.StringIO()
    with open_log(tmp_path, Console(file=output, force_terminal=True, width=width, color_system=None)) as log:
        log.write(replace(RECORD, loss_scale=65536.0, phases=2))
        log.say("saved")
    text = output.getvalue()
    shown = [line for line in text.replace("\x1b[2K", "").replace("\x1b[1A", "").splitlines() if "\x1b" not in line]
    assert "phase 1 of 2  step 12,000 of 900,000" in text
    assert "2 h 03 m left" in text
    assert "scale 65536" in text
    assert "3.2 GB" in text
    assert "saved" in text
    assert max(map(len, shown)) <= width
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is there again


PROGRESS = Progress("step 2", 1, 34, 1, 2, 10, 12_345.0, 75.0, None)


def test_a_terminal_tells_of_progress_between_records(tmp_path: Path) -> None:
    output = io.StringIO()
    with open_log(tmp_path, Console(file=output, force_terminal=True, width=80, color_system=None)) as log:
        log.show(replace(PROGRESS, step=0, pieces_per_second=None, seconds_left=None, doing="step 1"))
        wait_for(lambda: "step 1: " in output.getvalue())
        log.show(PROGRESS)
        wait_for(lambda: "step 2: " in output.getvalue())
        assert "phase 1 of 2  step 1 of 34" in output.getvalue()
        assert "1 m 15 s left" in output.getvalue()
        assert "12.3k pieces/s  losses follow at step 10" in output.getvalue()
        log.show(replace(PROGRESS, step=12, latest=RECORD, doing="step 13"))
        wait_for(lambda: "step 13: " in output.getvalue())
        assert "loss 6.5321  masked 5.8420 12.3%  next 0.6901 55.1% (larger class 51.3%)" in output.getvalue()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_without_a_terminal_progress_comes_ever_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, and then where nothing was printed for 5 seconds, 10, 20, 40, and at last for a minute."""
    output, now = io.StringIO(), 1000.0
    monkeypatch.setattr("pretraining.reporting.run_log.time", SimpleNamespace(time=time.time, monotonic=lambda: now))
    with open_log(tmp_path, Console(file=output)) as log:
        log.show(replace(PROGRESS, step=0, pieces_per_second=None))  # nothing is known yet
        for second in range(1, 301):
            now = 1000.0 + second
            log.show(replace(PROGRESS, step=second, total_steps=300))
            if second == 200:
                log.write(RECORD)  # a line too
    steps = [int(line.partition("/")[0]) for line in output.getvalue().splitlines()]
    assert steps == [1, 6, 16, 36, 76, 136, 196, 12000, 260]


def test_numbers_as_people_read_them() -> None:
    numbers = {7.4: "7", 999: "999", 12345: "12.3k", 4.561e6: "4.56M", 123.4e9: "123G"}
    assert [*map(format_number, numbers)] == [*numbers.values()]
