"""Whole runs of shard.py on one core: from files of text to shards, and from kept documents.

All sides take turns on the same text: one duplicate, five duplicates, and five from the documents in pieces, which
takes little more than the examples and shards of the second. Then one worker and two take turns on all cores.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from benchmarks.contests import OURS, alternate
from benchmarks.processes import pin_to_one_core
from data_prep.common.workers import open_workers
from data_prep.pipeline import Pipeline
from data_prep.running import Runner, Step
from data_prep.settings import Settings

FIVE = "5 duplicates"
OF_EXAMPLES = ("examples", "merged", "shards")
"""Prefixes of the steps that --from runs too."""


class PreparationRun:
    """Runs shard.py in this process, and discards the shards. Keeps the seconds of each step of the last run."""

    def __init__(self, settings: Settings, workers: int = 1) -> None:
        self._settings, self._workers = settings, workers
        self.seconds: dict[str, float] = {}

    def __call__(self) -> None:
        """Runs it once."""
        with tempfile.TemporaryDirectory() as folder, open_workers(self._workers, preload=Pipeline.__module__) as pool:
            assert pool is not None
            with time_steps() as self.seconds:
                make(Path(folder) / "out", self._settings, pool)

    def of_examples(self) -> float:
        """Returns the seconds of examples and shards in the last run."""
        return sum(seconds for step, seconds in self.seconds.items() if step.startswith(OF_EXAMPLES))


def make(out: Path, settings: Settings, pool: Any) -> None:
    """Runs shard.py without output."""
    Pipeline(out, settings, pool, Console(file=io.StringIO())).run()


@contextmanager
def time_steps() -> Iterator[dict[str, float]]:
    """Measures the seconds of each step of runs within the context."""
    seconds: dict[str, float] = {}
    usual = Runner.run

    def timed(self: Runner, step: Step[Any, Any], tasks: Callable[[], Iterable[Any]]) -> Any:
        start = time.perf_counter()
        try:
            return usual(self, step, tasks)
        finally:
            seconds[step.name] = seconds.get(step.name, 0.0) + time.perf_counter() - start

    with mock.patch.object(Runner, "run", timed):
        yield seconds


def select_files(files: Iterable[Path], megabytes: float) -> tuple[tuple[str, ...], float]:
    """Returns the first files that have about this number of MB, and their size in MB."""
    chosen, size = list[str](), 0
    for path in files:
        if size >= megabytes * 1e6:
            break
        chosen.append(str(path))
        size += path.stat().st_size
    return tuple(chosen), round(size / 1e6, 1)


def measure_whole_runs(
    files: Iterable[Path], format: str, vocabulary: Path, megabytes: float, rounds: int
) -> dict[str, Any]:
    """Measures whole runs on a text of this size: MB a second, and ratios of runs."""
    docs, size = select_files(files, megabytes)
    source, settings = docs if format != "demo" else ("demo",), partial(Settings, lengths=(128, 512))
    of_text = partial(settings, docs=(source,), vocab=str(vocabulary))
    once, five = PreparationRun(of_text(duplicates=1)), PreparationRun(of_text(duplicates=5))
    with tempfile.TemporaryDirectory() as place:
        kept = Path(place) / "kept"
        with open_workers(1, preload=Pipeline.__module__) as pool:
            make(kept, of_text(documents_only=True), pool)
        sides: dict[str, Callable[[], Any]] = {
            OURS: once,
            FIVE: five,
            "examples and shards": five.of_examples,
            "from documents": PreparationRun(settings(origins=((str(kept),),), duplicates=5)),
        }
        with pin_to_one_core():
            turns = alternate(sides, rounds, warm_up=1)
        both = alternate({FIVE: five, "2 workers": PreparationRun(of_text(duplicates=5), workers=2)}, rounds, warm_up=1)
    return {
        "text_mb": size,
        "mb_per_s_of_a_core": round(size / turns.summarise_side(OURS)["median"], 2),
        "with_5_duplicates": round(size / turns.summarise_side(FIVE)["median"], 2),
        "from_documents_takes": turns.compute_ratio("from documents", "examples and shards"),
        "two_workers_are": both.compute_ratio(FIVE, "2 workers"),
        **{f"{step}_s": round(seconds, 2) for step, seconds in once.seconds.items()},
    }
