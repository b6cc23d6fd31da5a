#!/usr/bin/env python3
"""Shows how runs of pre-training and fine-tuning are doing, from their files alone: on a login node, or beside
the GPUs.

    python cluster/status.py                          all runs below runs/, the newest last
    python cluster/status.py runs/large --watch
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
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cluster.jobs import Queue, ask_queue, read_notes
from cluster.panels import build_panel
from cluster.runs import CURE, RunStatus, find_pipes, find_runs, read_run
from cluster.tuning import TuningStatus, build_tuning_panel, find_tunings, read_tuning
from data_prep.common.errors import UserError
from data_prep.common.terminal import open_console, run_curable
from pretraining.objectives.declaration import list_loss_curves
from pretraining.reporting.metrics_file import METRICS

QUEUE_SECONDS = 30.0
"""The least time between two questions to the queue while runs are watched."""


@dataclass(frozen=True)
class Status:
    """Shows how runs of pre-training and fine-tuning are doing, from their files alone."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Folders that train.py or a command of finetuning/ had as --out, or folders above them."""
    watch: bool = False
    """Look again and again, until Ctrl-C."""
    every: float = 5.0
    """With --watch: seconds between two looks."""
    charts: bool = False
    """Draw the losses of every run so far, with those of validation, into loss.png in its folder, and end."""
    json: bool = False
    """Print JSON, for scripts."""


class Observer:
    """Reads runs, once or repeatedly. Asks the queue, which all users share, at most every QUEUE_SECONDS."""

    def __init__(self, named: tuple[Path, ...]) -> None:
        self._named, self._queue = named, Queue(None)
        self._jobs: set[str] = set()
        self._asked = 0.0
        self.warnings: list[str] = []
        """of the last reading: pipes with the names of files, and why the queue gave no answer"""

    def read_all(self) -> list[RunStatus | TuningStatus]:
        """Reads how all runs of pre-training and fine-tuning are doing; UserError where there is none."""
        runs, tunings, now = find_runs(*self._named), find_tunings(*self._named), time.time()
        notes = [read_notes(run) for run in runs]
        jobs = {own.job for own in notes if own is not None}
        if jobs != self._jobs or time.monotonic() - self._asked > QUEUE_SECONDS:
            self._queue, self._jobs, self._asked = ask_queue(jobs), jobs, time.monotonic()
        pipes = [path for folder in (*runs, *tunings) for path in find_pipes(folder)]
        self.warnings = [f"warning: {path}: not read, since it is a pipe or a device; remove it" for path in pipes]
        if self._queue.fault:
            self.warnings.append(f"warning: {self._queue.fault}; nothing is known of jobs")
        if not runs and not tunings:
            names = ", ".join(map(str, self._named))
            raise UserError(f"{names}: no run, and none in it: they have {METRICS} once they train\n{CURE}")
        read = (read_run(run, own, self._queue, now) for run, own in zip(runs, notes, strict=True))
        return [*read, *(read_tuning(folder, now) for folder in tunings)]

    def build_panels(self, width: int) -> list[RenderableType]:
        """Builds a panel for each run, and a line for each warning."""
        found = self.read_all()
        panels = (build_panel(run, width) if isinstance(run, RunStatus) else build_tuning_panel(run) for run in found)
        return [*panels, *(Text(warning, "yellow") for warning in self.warnings)]


def watch(observer: Observer, every: float, console: Console) -> None:
    """Shows the runs in place until Ctrl-C; in a pipe, one look below the other."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the terminal gets its cursor back
    footer = Text(f"every {every:g} s; Ctrl-C ends this", "dim")
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            shown = observer.build_panels(console.width)
            if live is None:
                console.print(*shown, sep="\n")
            else:
                live.update(Group(*fit_panels(shown, console), footer), refresh=True)
            time.sleep(every)


def fit_panels(shown: list[RenderableType], console: Console) -> list[RenderableType]:
    """Returns the last panels that the terminal has room for, below a line with the number of those left out."""
    room, kept = console.height - 3, list[RenderableType]()
    for renderable in reversed(shown):
        room -= len(console.render_lines(renderable))
        if room < 0 and kept:
            break
        kept.insert(0, renderable)
    left_out = len(shown) - len(kept)
    if left_out:
        kept.insert(0, Text(f"{left_out} more above: name runs, or make the window higher", "dim"))
    return kept


def run(wanted: Status, console: Console, errors: Console) -> None:
    """Shows or watches runs, prints them as JSON, or draws their losses."""
    if wanted.charts:
        from pretraining.reporting.figures import draw_losses  # NumPy and Matplotlib, for pictures alone

        folders = find_runs(*wanted.runs)
        if not folders:
            raise UserError(f"{', '.join(map(str, wanted.runs))}: no run of pre-training to draw\n{CURE}")
        for folder in folders:
            console.print(draw_losses(folder, list_loss_curves()), markup=False, soft_wrap=True)
        return
    if wanted.every <= 0:
        raise UserError(f"--every {wanted.every:g}: give seconds above 0")
    if wanted.watch and wanted.json:
        raise UserError("--watch and --json do not go together; let your script look again")
    observer = Observer(wanted.runs)
    if wanted.watch:
        watch(observer, wanted.every, console)
    elif wanted.json:
        content = [asdict(status) for status in observer.read_all()]
        text = json.dumps(content, indent=1, sort_keys=True)  # in ASCII: names of files may be no text
        console.print(text, markup=False, soft_wrap=True)
        for warning in observer.warnings:
            errors.print(warning, markup=False)
    else:
        console.print(*observer.build_panels(console.width), sep="\n")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 2 for what the user can cure, 130 where Ctrl-C has ended it."""
    wanted = tyro.cli(Status, args=arguments, prog="status.py", config=(tyro.conf.FlagCreatePairsOff,))
    return run_curable(lambda: run(wanted, open_console(), open_console(stderr=True, soft_wrap=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
