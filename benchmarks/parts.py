"""How preparation grows: with the number of parts, measured on small ones, and with the text, worked out from a sample.

The same text is divided into more and more parts. What a run takes longer with many of them is what a part takes by
itself, however small it is; what a byte of text takes is measured on a sample that goes through all steps. Both
together say what larger corpora take, which no machine at hand could hold.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.measure import ROOT
from benchmarks.tables import matrix, show
from data_prep.forecast import Amount, Text, measure, steps_of
from data_prep.readers.sources import LARGEST_BUNDLE, find_files
from data_prep.settings import Settings
from data_prep.shards import KEPT, WORK
from data_prep.vocabulary.source import find_vocabulary

FEWEST = 60  # parts, of which there are about so many however small a text is
SIZES = {"2 GB": 2e9, "20 GB": 2e10, "1 TB": 1e12, "10 TB": 1e13}
WORKERS = 32
SMALL_BUNDLES = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from data_prep.readers import sources; sources.SMALLEST_BUNDLE = sources.LARGEST_BUNDLE = {size}; "
    "from data_prep import shard; sys.exit(shard.main(sys.argv[1:]))"
)
STEP = re.compile(r"^(\w+)([\d -]*)\s+100%.* in (?:(\d+) h )?(?:(\d+) m )?([\d.]+)(?: s)?")


def measure_parts(docs: Sequence[str], vocabulary: Path, most: int, console: Console) -> dict[str, Any]:
    """Measures runs with more and more parts, and works out what larger texts take."""
    settings = Settings(docs=(tuple(docs),), vocab=str(vocabulary))
    files = find_files(list(docs))
    size = sum(file.size for file in files)
    rows = []
    for count in (FEWEST, *(most // step for step in (8, 4, 2, 1) if most // step > 4 * FEWEST)):
        rows.append(watched_run(docs, vocabulary, size, size // count))
        show(console, [matrix("", rows[-1:])])
    last, first = rows[-1], rows[0]
    more = last["parts"] - first["parts"]
    each = {
        name: round(2000 * (last[name] - first[name]) / more, 2) for name in first if name.endswith("_s") and more > 0
    }
    with tempfile.TemporaryDirectory() as place:
        given = find_vocabulary(str(vocabulary), cased=False)
        costs = measure(settings, given, Text(files), Path(place), console)
    arithmetic = [
        {
            "text": name,
            "step": step.name,
            "tasks": step.tasks,
            "core_hours": round(step.core_seconds / 3600, 2),
            f"hours_on_{WORKERS}_workers": round(step.core_seconds / 3600 / min(WORKERS, step.tasks), 3),
            "disk_gb": round(step.disk / 1e9, 1),
            "files": step.files,
        }
        for name, total in SIZES.items()
        for step in steps_of(settings, costs, Amount(total), round(total / LARGEST_BUNDLE))
    ]
    return {
        "parts": rows,
        "core_ms_of_a_part": [each],
        "core_seconds_of_a_gb": [{name: round(1e9 * cost, 1) for name, cost in costs.seconds.items()}],
        "arithmetic": arithmetic,
        "sums": [sum_of(arithmetic, name) for name in SIZES],
    }


def sum_of(arithmetic: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """All steps of one size of text together."""
    steps = [row for row in arithmetic if row["text"] == name]
    return {
        "text": name,
        "core_hours": round(sum(row["core_hours"] for row in steps), 2),
        f"minutes_on_{WORKERS}_workers": round(60 * sum(row[f"hours_on_{WORKERS}_workers"] for row in steps), 1),
        "disk_gb": max(row["disk_gb"] for row in steps),
        "files": sum(row["files"] for row in steps),
    }


def watch(command: Sequence[str], look: Callable[[list[psutil.Process]], None], pause: float) -> tuple[float, str]:
    """Runs a command, and looks every `pause` seconds at its process and all that descend from it; returns how long it
    took, and what it said."""
    with tempfile.TemporaryFile("w+") as said:
        start = time.perf_counter()
        process = psutil.Popen(command, stdout=said)
        while process.poll() is None:
            with suppress(psutil.Error):  # some have ended meanwhile
                look([process, *process.children(recursive=True)])
            time.sleep(pause)
        seconds = time.perf_counter() - start
        assert process.returncode == 0
        said.seek(0)
        return seconds, said.read()


def watched_run(docs: Sequence[str], vocabulary: Path, size: int, part_bytes: int) -> dict[str, Any]:
    """Runs shard.py on two workers with parts of so many bytes; returns what each step took, memory and files."""
    private, files, parts = [0], [0], [0]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"

        def look(processes: Sequence[psutil.Process]) -> None:
            counts = {folder: len(names) for place in (WORK, KEPT) for folder, _, names in os.walk(out / place)}
            files.extend(counts.values())
            parts.append(sum(count for folder, count in counts.items() if folder.startswith(f"{out / KEPT}/")))
            for each in processes[1:]:  # files that are mapped are of the machine, which takes them back
                with suppress(psutil.Error):  # it has ended meanwhile
                    private.append(each.memory_full_info().uss)

        code = SMALL_BUNDLES.format(root=str(ROOT), size=part_bytes)
        arguments = ["--docs", *docs, "--out", str(out), "--vocab", str(vocabulary), "--workers", "2"]
        seconds, said = watch([sys.executable, "-c", code, *arguments], look, 0.5)
    return {
        "parts": max(parts),
        "text_mb": round(size / 1e6),
        "seconds": round(seconds, 1),
        **{f"{step}_s": round(taken, 1) for step, taken in seconds_of(said).items()},
        "worker_private_mb": round(max(private) / 1e6),
        "most_files_in_a_folder": max(files),
    }


def seconds_of(said: str) -> dict[str, float]:
    """Reads what every kind of step took from what a run printed, all lengths together."""
    found: dict[str, float] = defaultdict(float)
    for line in said.splitlines():
        if match := STEP.match(line):
            hours, minutes, seconds = (float(match[group] or 0) for group in (3, 4, 5))
            found[match[1]] += 3600 * hours + 60 * minutes + seconds
    return {step: found[step] for step in ("documents", "tokens", "examples", "merged", "shards")}
