#!/usr/bin/env python3
"""Measures how often a waiting thread should look whether the others are there, before it gives up its core.

    python benchmarks/spin_counts.py
    python benchmarks/spin_counts.py --counts 2000 50000 --rounds 5

Steps of a fine-tuning of mini on SST-2, or of the demo corpus, with a thread for each core: each count has a process by
itself, and one beside a program that keeps one core busy. All take turns. The numbers are kept in benchmarks/results/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks import fine_tuning_ranks
from benchmarks.contests import Turns, alternate
from benchmarks.fine_tuning import FILES, make_model
from benchmarks.measure import DATA, FORMAT, environment, results_file, run_command, write_results
from benchmarks.tables import matrix, show
from benchmarks.texts import write_demo_task
from data_prep.common.capacity import num_cores
from data_prep.common.errors import UserError
from pretraining.model.shape import SIZES
from pretraining.processes.environment import SPINS_ALONE, SPINS_AMONG_OTHERS


@dataclass(frozen=True)
class SpinCounts:
    """Measures how often a waiting thread should look whether the others are there."""

    counts: tuple[int, ...] = (int(SPINS_AMONG_OTHERS), 30_000, 300_000, int(SPINS_ALONE))
    """How often a thread looks; the last one is what the others are compared with."""
    size: str = "mini"
    """Size of the model, whose weights are fresh."""
    steps: int = 32
    """Steps that are timed at a time."""
    rounds: int = 3
    """Processes of each count, alone and beside another program."""
    data: Path = DATA
    """Folder with glue/SST-2 and vocab.txt; without it, sentences of the demo corpus."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""


@contextmanager
def busy_core() -> Iterator[None]:
    """Another program keeps one core at work."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            yield
        finally:
            other.kill()


def seconds_of_a_step(count: int, beside: bool, words: Sequence[str], notes: Path) -> float:
    """What a step takes a process whose threads look so often."""
    command = [sys.executable, fine_tuning_ranks.__file__, *words]
    with busy_core() if beside else nullcontext():
        done = subprocess.run(
            command, env={**os.environ, "GOMP_SPINCOUNT": str(count)}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise UserError(f"steps with {count} looks have failed: {done.stderr[-1000:]}")
    return float(notes.read_text().split()[-1])


def measure(settings: SpinCounts, console: Console) -> None:
    """Lets all counts take turns, prints the table, and keeps it."""
    if (
        settings.size not in SIZES
        or min((settings.rounds, settings.steps, *settings.counts)) < 1
        or not settings.counts
    ):
        raise UserError(f"--size: of {', '.join(SIZES)}; --counts, --steps and --rounds from 1 on")
    with tempfile.TemporaryDirectory() as place:
        folder, notes = Path(place), Path(place) / "notes"
        make_model(settings.size, settings.data, folder / "model")
        real = (settings.data / FILES["sst2"]).exists()
        data = settings.data.resolve() if real else write_demo_task(folder / "data")
        words = [f"--steps={settings.steps}", f"--data={data}", f"--notes={notes}", f"--threads={num_cores()}"]
        sides = {
            f"{count} {where}": partial(seconds_of_a_step, count, where == "beside", words, notes)
            for count in settings.counts
            for where in ("alone", "beside")
        }
        report(settings, "sst2" if real else "demo", alternate(sides, settings.rounds), console)


def report(settings: SpinCounts, task: str, turns: Turns, console: Console) -> None:
    """Prints how long steps take with each count, and keeps it."""
    last = settings.counts[-1]
    rows = [
        {
            "looks": f"{count:,}",
            "seconds a step": turns.of(f"{count} alone"),
            "times the last": turns.ratio(f"{count} alone", f"{last} alone"),
            "beside another program": turns.of(f"{count} beside"),
            "times the last there": turns.ratio(f"{count} beside", f"{last} beside"),
        }
        for count in settings.counts
    ]
    show(console, [matrix(f"Fine-tuning {settings.size} on {task}", rows)])
    results = {"format": FORMAT, "benchmark": "spin_counts", "environment": environment(["torch"])}
    described = {"size": settings.size, "task": task, "rows": rows}
    write_results(settings.out or results_file("spin-counts"), {**results, **described})


if __name__ == "__main__":
    run_command(SpinCounts, measure)
