"""How everything is measured: alternating runs, medians, ratios; and where, so that a number can be repeated."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pretraining.batches import Batch

RESULTS = Path(__file__).parent / "results"
SHARD = Path(__file__).parent.parent / "data_prep" / "shard.py"
DATA = Path(os.environ.get("CLOZE_DATA", "../shared/data"))


def alternate(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round. They take turns, so that what disturbs one disturbs all."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median over the rounds of first / second."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def environment(libraries: Sequence[str]) -> dict[str, Any]:
    """What decides the numbers besides the code."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Keeps the numbers under benchmarks/results."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def make_shards(data: Path, folder: Path) -> Path:
    """Shards of real text with the published vocabulary, one duplicate of each length."""
    out = folder / "shards"
    command = [sys.executable, str(SHARD), "--docs", str(data / "wiki/AA"), "--out", str(out)]
    options = ["--vocab", str(data / "vocab.txt"), "--duplicates", "1", "--lengths", "128", "512"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return out


def padded(batch: Batch) -> dict[str, torch.Tensor]:
    """The batch as transformers takes it, padded to its longest sequence."""
    width = max(batch.lengths)
    ids, segments, mask = (torch.zeros(len(batch.lengths), width, dtype=torch.int64) for _ in range(3))
    labels, flat = torch.full_like(ids, -100), torch.full_like(batch.pieces, -100)
    flat[batch.chosen] = batch.labels
    for row, (start, end) in enumerate(pairwise(batch.starts.tolist())):
        size = end - start
        ids[row, :size], segments[row, :size], mask[row, :size] = batch.pieces[start:end], batch.segments[start:end], 1
        labels[row, :size] = flat[start:end]
    return {
        "input_ids": ids,
        "token_type_ids": segments,
        "attention_mask": mask,
        "labels": labels,
        "next_sentence_label": batch.random_next,
    }
