#!/usr/bin/env python3
"""Trains by train.py, kills the run, and continues it: measures speed, loader, checkpoint and resumption.

python benchmarks/gpu/trainer.py large-128-1024
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich.console import Console

from benchmarks.gpu.parts import DATA
from benchmarks.measure import ROOT, run_command, write_results
from benchmarks.training_sides import Contest
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from pretraining.checkpoint.record import list_finished, parse_step
from pretraining.reporting.metrics_file import METRICS, read_all_records

SETTLED = 3
"""Steps after a start that do not count: they compile, allocate and read for the first time."""
SECONDS, DRY_SECONDS = 75.0, 2.0
"""Training time of each start, from its first step; without a GPU, where nothing is measured."""
EVERY = 20
"""Steps between checkpoints: a start on an H200 makes some fifty."""


@dataclass(frozen=True)
class TrainerPart:
    """Trains by train.py, kills the run, and continues it."""

    contest: tyro.conf.Positional[str]
    """SIZE-LENGTH-SEQUENCES of a step, of which as many as fit are computed at a time."""
    out: tyro.conf.Positional[Path | None] = None
    """File for the results."""


def build_command(contest: Contest, run: Path) -> list[str]:
    """Builds the command that trains into a folder, by itself without an end."""
    own = ("--model.size", contest.size, "--phases.0.batch", contest.sequences)
    lengths = [word for n in (0, 1) for word in (f"--phases.{n}.length", contest.length)]  # 1 is never reached
    often = ("--checkpoints.every", EVERY, "--checkpoints.keep", 2, "--evaluation.every", 1_000_000)
    bare = ("--logging.tensorboard", "false")  # it needs another package
    words = ("--recipe", "bert_large_lamb", "--data", DATA, "--out", run, *own, *lengths, *often, *bare)
    return [sys.executable, str(ROOT / "pretraining/train.py"), *map(str, words)]


def train_for(command: Sequence[str], run: Path, seconds: float) -> list[dict[str, Any]]:
    """Trains for this time, for some steps and to a checkpoint at least, then kills the run, as a power cut does;
    returns its logged steps."""
    begun = time.time()

    def read_steps() -> list[dict[str, Any]]:
        lines = read_all_records(run / METRICS)
        return [line for line in lines if line["kind"] == "step" and line["time"] > begun]

    with subprocess.Popen(command) as process:
        try:
            steps = read_steps()
            while len(steps) <= SETTLED or steps[-1]["time"] - steps[0]["time"] < seconds or not list_finished(run):
                if process.poll() is not None:
                    raise UserError(f"the run ended with {process.returncode}; its output says why")
                time.sleep(0.2)
                steps = read_steps()
        finally:
            process.kill()
    return read_steps()


def summarise_speed(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns medians over the steps of a start, without the first SETTLED."""
    settled = steps[SETTLED:]
    names = ("pieces_per_second", "flops_utilisation", "waiting_for_data", "seconds_per_step")
    known = {name: [step[name] for step in settled if step.get(name) is not None] for name in names}
    peak = max(step["peak_memory_bytes"] for step in settled)
    return {
        "steps": len(settled),
        "peak_memory_gib": round(peak / 2**30, 2),
        **{name: statistics.median(values) for name, values in known.items() if values},
    }


def train_twice(contest: Contest, run: Path, seconds: float) -> dict[str, Any]:
    """Trains, kills the run after a checkpoint, and continues it."""
    command = build_command(contest, run)
    first = train_for(command, run, seconds)
    saved = parse_step(list_finished(run)[-1])
    second = train_for(command, run, seconds)
    before = {step["step"]: step["loss"] for step in first}
    again = [abs(step["loss"] - before[step["step"]]) for step in second if step["step"] in before]
    return {
        "first": summarise_speed(first),
        "continued": summarise_speed(second),
        "killed_after_step": first[-1]["step"],
        "newest_checkpoint": saved,
        "continued_with_step": second[0]["step"],
        "steps_made_again": len(again),
        "largest_difference_of_their_losses": max(again, default=None),
    }


def measure(settings: TrainerPart, console: Console) -> int:
    """Trains, prints and writes the results; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = SECONDS if torch.cuda.is_available() else DRY_SECONDS
        found = train_twice(Contest.parse(settings.contest), Path(folder) / "run", seconds)
    if settings.out is not None:
        write_results(settings.out, found)
    console.print("\n".join(f"{name}: {value}" for name, value in found.items()), markup=False)
    return Code.DONE if found["continued_with_step"] == found["newest_checkpoint"] + 1 else Code.MISTAKE


if __name__ == "__main__":
    run_command(TrainerPart, measure, "gpu")
