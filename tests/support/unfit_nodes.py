"""Ranks as nodes of a preflight, and what is wrong with one of them."""

from __future__ import annotations

import errno
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from support.faults import replace

from cluster import findings, health, preflight
from cluster.health import Health
from data_prep.common.errors import UserError
from data_prep.common.supervision import exit_now

Fault = Callable[[], object]
RATE = 1e12
LOOKED = 0.3  # seconds after which the other nodes have looked at what they look at together


def be_node(words: Sequence[str], faulty: int, fault: Fault) -> None:
    """A rank on a node of its own, which is like the others but for its fault."""
    rank = os.environ["RANK"]
    node = os.environ.get("NODE_OF_ALL", f"node{rank}")
    os.environ |= {"SLURMD_NODENAME": node, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    replace(preflight, "measure_flops", lambda *_: RATE)
    findings.SLOW_LINK = 0.1  # a busy machine is no network
    preflight.AGAIN_SECONDS = 0.2
    if int(rank) == faulty:
        fault()
    exit_now(preflight.main(list(words)))


def differ_in_all() -> None:
    """Has other code, another Python, no data, no disk, another GPU that is sick, and a driver that crashes."""

    def describe_gpu(report: Health, _: object) -> str:
        report.faults["GPU"] = "9.0 GiB are taken by other programs"
        return "8 x V100"

    check_data, health.ROOT = health.check_data, Path(__file__).parent
    have_another_python()
    replace(health, "check_data", lambda folder: check_data(folder / "elsewhere"))
    replace(tempfile, "TemporaryFile", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    replace(health, "describe_gpu", describe_gpu)
    crash = RuntimeError("CUDA error: unspecified launch failure\nhints")
    replace(preflight, "measure_flops", Mock(side_effect=crash))


def have_another_python() -> None:
    replace(platform, "python_version", lambda: "2.7.18")


def lose_the_data() -> None:
    """All nodes lose it after the others have seen it; it comes back where the test says so."""
    check, seconds = health.check_data, os.environ.get("BACK_AFTER")

    def lose(folder: Path) -> Any:
        replace(health, "check_data", check)
        time.sleep(LOOKED)
        away = (folder / "manifest.json").rename(folder / "away")
        if seconds:
            threading.Timer(float(seconds), away.rename, [folder / "manifest.json"]).start()
        return check(folder)

    replace(health, "check_data", lose)


def find_the_data_later() -> None:
    """All nodes lose it for longer than a node alone is waited for; this one has it back two looks after the others."""
    check, exists, looks, back = health.check_data, os.path.exists, 0, preflight.FEW + 3

    def look(folder: Path) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            (folder / "manifest.json").rename(folder / "away")
        if looks == back:
            time.sleep(LOOKED)
            (folder / "away").rename(folder / "manifest.json")
        if looks > back + 2:
            replace(os.path, "exists", exists)
            return check(folder)
        replace(os.path, "exists", lambda path: False if Path(path).name == "manifest.json" else exists(path))
        raise UserError(f"{folder / 'manifest.json'}: missing")

    replace(health, "check_data", look)


def multiply_slowly() -> None:
    replace(preflight, "measure_flops", lambda *_: 0.6 * RATE)


def exchange_slowly() -> None:
    measure = health.time_repeats

    def slowly(work: Callable[[], object], device: torch.device) -> list[float]:
        return [seconds + 0.2 for seconds in measure(work, device)]

    replace(health, "time_repeats", slowly)


def exchange_nothing() -> None:
    replace(health, "exchange", lambda *_: time.sleep(60))


def compute_nothing() -> None:
    replace(preflight, "measure_flops", lambda *_: time.sleep(60))


def die() -> None:
    replace(health, "exchange", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def sync_for_ever(mark: Path) -> None:
    def sync(_: int) -> None:
        mark.touch()
        time.sleep(60)

    replace(os, "fsync", sync)


def nothing() -> None:
    pass
