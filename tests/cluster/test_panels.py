"""How a run looks in a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.run_folders import Look, end, note, shown, start, status, strip
from support.training import records

from cluster import jobs
from cluster.jobs import Queue
from data_prep.common.codes import ENDED
from data_prep.common.files import write_json
from pretraining.reporting.metrics_file import METRICS
from pretraining.training.skips import Skip, write_skips

pytest_plugins = ["support.run_fixtures"]


def test_a_failed_run_says_why(run: Path, look: Look) -> None:
    reason = "checkpoints: cannot be written: No space left on device\nmake room, or keep fewer checkpoints"
    write_json(run / ENDED, {"code": 2, "reason": reason, "rank": 1, "time": "2026-01-01T00:00:00+00:00"})
    text = strip(look(run))
    assert re.search(r"one  failed  \d+ days ago\n", text)
    for line in ("2 (something must be mended first): checkpoints: cannot be written", "make room, or keep fewer"):
        assert line in text


def test_a_run_that_went_back(run: Path, look: Look) -> None:
    again = [json.dumps({**line, "loss": 1.0}) for line in records(run)[5:]]
    with (run / METRICS).open("a") as file:
        file.write("\n".join(again) + "\n")
    write_skips(run, [Skip(1, 0, 2, "the loss leapt to 9.02 in the steps to 7")])
    now = status(run)
    assert [step for step, _ in now.losses] == list(range(1, 9))
    assert [loss for _, loss in now.losses[5:]] == [1.0] * 3
    assert "went back   1 time to a checkpoint, the last since the loss leapt to 9.02 in the steps to 7" in strip(
        look(run)
    )


def test_the_curve_falls_from_the_top_to_the_bottom(run: Path) -> None:
    with (run / METRICS).open("w") as file:
        for step in range(1, 1001):
            file.write(json.dumps({"kind": "step", "step": step, "phase": 1, "loss": 11 - step / 100}) + "\n")
    lines = shown(status(run), 80)[-4:-1]
    top, _, bottom = (re.sub("[^▁▂▃▄▅▆▇█]", "", line) for line in lines)
    assert re.search(r"≥ 10\.0\d  █", lines[0])
    assert re.search(r"  1\.\d\d  █", lines[2])
    assert len(top) < 40 < 60 < len(bottom), "it fills the width"
    assert (top[0], bottom[-1]) == ("█", "▁")
    assert list(bottom) == sorted(bottom, reverse=True)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_into_the_terminal(width: int, run: Path) -> None:
    note(run, start("123_4"), end("123_4", 75), start("123_4", 1))
    write_json(run / ENDED, {"code": 76, "reason": "word " * 60, "rank": 1, "time": "2099-01-01T00:00:00+00:00"})
    write_skips(run, [Skip(1, 0, 2, "the loss leapt " * 10)])
    queue = Queue({"123_4": jobs.QueuedJob("123_4", "COMPLETING", "None", "node[001-128]")})
    lines = shown(status(run, queue=queue), width)
    assert max(map(len, lines)) <= width
    assert len(lines) > 12
