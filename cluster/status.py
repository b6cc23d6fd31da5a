#!/usr/bin/env python3
"""Shows how runs of pre-training and fine-tuning are doing, from their files alone: on a login node, or beside
the GPUs.

    python cluster/status.py                          all runs below runs/, the newest last
    watch -n 15 python cluster/status.py runs/large   again and again, until Ctrl-C
    python cluster/status.py runs/large --json
    python cluster/status.py runs/large --charts      its losses as a picture

Where Slurm is at hand, its queue is asked once about the jobs of all runs.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from cluster.panels import build_panel
from cluster.runs import CURE, RunStatus, ask_queue, find_runs, read_notes, read_run
from cluster.tuning import TuningStatus, build_tuning_panel, find_tunings, read_tuning
from data_prep.common.errors import UserError
from data_prep.common.flags import read_flags
from data_prep.common.terminal import open_console, run_curable
from pretraining.objectives.declaration import list_loss_curves
from pretraining.reporting.metrics_file import METRICS


@dataclass(frozen=True)
class Status:
    """Shows how runs of pre-training and fine-tuning are doing, from their files alone."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Folders that train.py or a command of finetuning/ had as --out, or folders above them."""
    charts: bool = False
    """Draw the losses of every run so far, with those of validation, into loss.png in its folder, and end."""
    json: bool = False
    """Print JSON, for scripts."""


def read_all(named: Sequence[Path]) -> tuple[list[RunStatus | TuningStatus], list[str]]:
    """Reads how all runs of pre-training and fine-tuning are doing; UserError where there is none. Returns a warning,
    too, where the queue gave no answer."""
    runs, tunings, now = find_runs(*named), find_tunings(*named), time.time()
    if not runs and not tunings:
        names = ", ".join(map(str, named))
        raise UserError(f"{names}: no run here or below: runs have {METRICS} once they train\n{CURE}")
    notes = [read_notes(run) for run in runs]
    queue = ask_queue({own.job for own in notes if own is not None})
    read = [read_run(run, own, queue, now) for run, own in zip(runs, notes, strict=True)]
    warnings = [f"warning: {queue.fault}; nothing is known of jobs"] if queue.fault else []
    return [*read, *(read_tuning(folder, now) for folder in tunings)], warnings


def show_runs(wanted: Status, console: Console, errors: Console) -> None:
    """Shows runs, prints them as JSON, or draws their losses."""
    if wanted.charts:
        from pretraining.reporting.figures import draw_losses  # NumPy and Matplotlib, for pictures alone

        folders = find_runs(*wanted.runs)
        if not folders:
            raise UserError(f"{', '.join(map(str, wanted.runs))}: no run of pre-training to draw\n{CURE}")
        for folder in folders:
            console.print(draw_losses(folder, list_loss_curves()), markup=False, soft_wrap=True)
        return
    found, warnings = read_all(wanted.runs)
    if wanted.json:
        text = json.dumps([asdict(status) for status in found], indent=1, sort_keys=True)  # in ASCII, as names may need
        console.print(text, markup=False, soft_wrap=True)
        for warning in warnings:
            errors.print(warning, markup=False)
    else:
        width = console.width
        panels = (build_panel(run, width) if isinstance(run, RunStatus) else build_tuning_panel(run) for run in found)
        console.print(*panels, *(Text(warning, "yellow") for warning in warnings), sep="\n")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can cure, 130 where Ctrl-C has ended it."""
    wanted = read_flags(Status, arguments, "status.py", "cluster")
    return run_curable(lambda: show_runs(wanted, open_console(), open_console(stderr=True, soft_wrap=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
