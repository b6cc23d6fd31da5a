"""Ctrl-C ends shard.py within three seconds in every step, whatever it reads or computes, and loses nothing."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, sentence
from support.commands import wait_for

from data_prep.shards import WORK
from data_prep.verify import FINE, UNFINISHED

STEPS = {
    "documents": "lock",
    "words": "documents.finished",
    "vocabulary": "words.finished",
    "tokens": "vocabulary.finished",
    "examples": "split.finished",
    "shards": "examples-128.finished",
}
"""The steps, each with a file of the work folder that is there once it begins."""


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes one line of 60 MB, on which every step takes seconds within one call."""
    draw, folder = random.Random(3), tmp_path_factory.mktemp("line")
    text = " ".join(sentence(draw) for _ in range(8000)).encode()
    with gzip.open(folder / "line.txt.gz", "wb", 1) as file:
        for _ in range(60_000_000 // len(text)):
            file.write(text + b" ")
    return folder


def start_group(text: Path, out: Path, workers: int) -> subprocess.Popen[str]:
    """Starts shard.py as a shell does, in a group of processes that all hear the key."""
    words = ["--docs", str(text), "--out", str(out), "--workers", str(workers), "--vocab-size", "500"]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "data_prep/shard.py"), *words, "--duplicates", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def nobody(processes: list[psutil.Process]) -> bool:
    """Tells whether none of these is alive."""
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGINT), (2, signal.SIGINT), (1, signal.SIGTERM)])
def test_every_step_ends_within_three_seconds_of_the_key(
    workers: int, number: signal.Signals, line: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for step, begun in STEPS.items():
        process = start_group(line, out, workers)
        wait_for((out / WORK / begun).exists, 200)
        time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        sent = time.monotonic()
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - sent < 3, step
        assert process.returncode == 130, step
        assert errors.count("interrupted; the same command continues where it stopped") == 1
        assert "Traceback" not in errors
        wait_for(partial(nobody, family), 2)
        verified = subprocess.run([sys.executable, str(ROOT / "data_prep/verify.py"), str(out)], check=False)
        assert verified.returncode == UNFINISHED
    _, errors = start_group(line, out, workers).communicate(timeout=300)
    assert not errors
    verified = subprocess.run([sys.executable, str(ROOT / "data_prep/verify.py"), str(out)], check=False)
    assert verified.returncode == FINE
