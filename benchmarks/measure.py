"""How everything is measured: alternating runs, medians, ratios; and where, so that a number can be repeated."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError

RESULTS = Path(__file__).parent / "results"
SHARD = Path(__file__).parent.parent / "data_prep" / "shard.py"
DATA = Path(os.environ.get("CLOZE_DATA", "../shared/data"))


def leave_own_folder() -> None:
    """Takes this folder off the path of a script: finetuning.py would hide the package of that name."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != here]


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
        **(_gpu() if "torch" in libraries else {}),
    }


def _gpu() -> dict[str, Any]:
    import torch  # preparing data needs none

    if not torch.cuda.is_available():
        return {}
    gpu = torch.cuda.get_device_properties(0)
    return {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_results(path: Path, results: dict[str, Any]) -> Path:
    """Keeps the numbers in a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


@contextmanager
def mistakes_told() -> Iterator[None]:
    """Around an entry: prints a user's mistake without a traceback, and ends with exit code 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
