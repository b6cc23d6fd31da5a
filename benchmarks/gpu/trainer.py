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

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich.console import Console

from benchmarks.gpu.parts import DATA
from benchmarks.measure import ROOT, run_command, write_results
from benchmarks.processes import Child
from benchmarks.training_sides import Contest
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from pretraining.checkpoint.record import list_finished, parse_step
from pretraining.reporting.metrics_file import METRICS, read_all_records

SETTLED = 3
"""Steps after a start that do not count: they compile, allocate and read for the first time."""
PATIENCE, STOPS_IN = 180.0, 60.0
"""Time limits in seconds: for the first steps or the next checkpoint, and for a stop."""
SECONDS, DRY_SECONDS = 150.0, 4.0
"""Training time of both starts together, from their first steps; without a GPU, where nothing is measured."""
EVERY = 20
"""Steps between checkpoints: a start on an H200 makes some fifty."""
TOLD = ("micro-batch", "continu", "warning")
"""Prefixes of the lines of a run that are kept."""


@dataclass(frozen=True)
class TrainerPart:
    """Trains by train.py, kills the run, and continues it."""

    contest: tyro.conf.Positional[str]
    """SIZE-LENGTH-SEQUENCES of a step, of which as many as fit are computed at a time."""
    out: tyro.conf.Positional[Path | None] = None
    """File for the results."""


class TrainerRun:
    """A run in a folder, and its output."""

    def __init__(self, contest: Contest, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self._say = folder, say
        own = ("--model.size", contest.size, "--phases.0.batch", contest.sequences)
        lengths = [word for n in (0, 1) for word in (f"--phases.{n}.length", contest.length)]  # 1 is never reached
        often = ("--checkpoints.every", EVERY, "--checkpoints.keep", 2, "--evaluation.every", 1_000_000)
        bare = ("--logging.tensorboard", "false")  # it needs another package
        words = ("--recipe", "bert_large_lamb", "--data", DATA, "--out", folder, *own, *lengths, *often, *bare)
        self.command = [sys.executable, str(ROOT / "pretraining/train.py"), *map(str, words)]
        self.lines: list[str] = []

    def begin(self) -> None:
        """Starts the command."""
        self.begun = time.time()
        self.child = Child(self.command, self._hear)

    def _hear(self, line: str) -> None:
        self.lines.append(line)
        self._say(line)

    def steps(self) -> list[dict[str, Any]]:
        """Returns the logged steps of the last start."""
        lines = read_all_records(self.folder / METRICS)
        return [line for line in lines if line["kind"] == "step" and line["time"] > self.begun]

    def wait_until(self, description: str, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds. Raises UserError with its description if that takes too long."""
        if not self.wait_for(condition, PATIENCE):
            raise UserError(f"after {PATIENCE:.0f} s nothing shows that the run {description}")

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition; returns False after `seconds`. Raises UserError if the run ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.child.process.poll() is not None:
                self.child.end()
                raise UserError(f"the run ended with {self.child.process.returncode}: {self.lines[-1:]}")
            time.sleep(0.2)
        return False

    def kill(self) -> None:
        """Kills the run, as a power cut does."""
        os.killpg(self.child.process.pid, signal.SIGKILL)
        self.child.process.wait()

    def stop(self) -> int | None:
        """Asks the run to save and stop; returns the exit code, or None if it does not end in time."""
        self.child.process.terminate()
        return self.child.wait(STOPS_IN)


def summarise_speed(steps: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Returns medians over the steps of a start, without the first SETTLED."""
    settled = list(steps)[SETTLED:]
    if not settled:
        raise UserError(f"fewer than {SETTLED + 1} steps in its time")
    names = ("pieces_per_second", "flops_utilisation", "waiting_for_data", "seconds_per_step")
    known = {name: [step[name] for step in settled if step.get(name) is not None] for name in names}
    peak = max(step["peak_memory_bytes"] for step in settled)
    return {
        "steps": len(settled),
        "peak_memory_gib": round(peak / 2**30, 2),
        **{name: statistics.median(values) for name, values in known.items() if values},
    }


def train_twice(training: TrainerRun, seconds: float) -> dict[str, Any]:
    """Trains for half of the time, kills the run after a checkpoint, and continues it for the other half."""
    train_for(training, seconds / 2)
    training.wait_until("has saved", lambda: bool(list_finished(training.folder)))
    training.kill()
    first = training.steps()
    saved = parse_step(list_finished(training.folder)[-1])
    second = train_for(training, seconds / 2)
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
        "stopped_with": training.stop(),
        "told": [line for line in training.lines if line.startswith(TOLD)],
    }


def train_for(training: TrainerRun, seconds: float) -> list[dict[str, Any]]:
    """Starts the run, and lets it train for this time and at least SETTLED steps; returns the steps."""
    training.begin()
    training.wait_until("makes steps", lambda: len(training.steps()) > SETTLED)
    training.wait_for(lambda: False, seconds)
    return training.steps()


def measure(settings: TrainerPart, console: Console) -> int:
    """Trains, prints and writes the results; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest.parse(settings.contest)
        training = TrainerRun(contest, Path(folder) / "run", lambda line: console.print(line, markup=False))
        try:
            found = train_twice(training, SECONDS if torch.cuda.is_available() else DRY_SECONDS)
        finally:
            training.child.end()
    if settings.out is not None:
        write_results(settings.out, found)
    console.print("\n".join(f"{name}: {value}" for name, value in found.items()), markup=False)
    goes_on = found["continued_with_step"] == found["newest_checkpoint"] + 1
    return Code.DONE if goes_on and found["stopped_with"] == Code.STOPPED else Code.MISTAKE


if __name__ == "__main__":
    run_command(TrainerPart, measure, "gpu")
