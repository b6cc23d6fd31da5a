"""Reads the status of fine-tuning from its folders: runs that are done, progress of the others, scores so far."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cluster.panels import frame_table
from cluster.runs import DEPTH, STATES, State, find_below, format_age, read_end, read_newest_lines, read_or, read_time
from data_prep.common.codes import ENDED, explain_code
from data_prep.common.files import read_table
from data_prep.common.locks import LOCK, find_deserter
from data_prep.common.progress import duration
from finetuning.results import BEGUN, PLAN, RESULTS, RunResult
from pretraining.reporting.console import format_seconds_left
from pretraining.reporting.metrics_file import METRICS

SILENT_SECONDS = 600.0
"""Seconds without a line, which reading a model and scoring a large split may take."""
PLANNED = TypeAdapter(dict[str, set[str]])
"""The names of the runs of a plan, by task."""


@dataclass(frozen=True)
class TaskStatus:
    """The status of the runs of a task."""

    task: str
    planned: int
    done: int
    failed: int
    metric: str
    best: float | None
    at_work: dict[str, dict[str, Any]]
    """the last record of each run that has begun and is not done, by name"""


@dataclass(frozen=True)
class TuningStatus:
    """The status of a folder of fine-tuning."""

    run: str
    state: State
    why: str
    tasks: list[TaskStatus]


def find_tunings(*named: Path) -> list[Path]:
    """Finds the folders of fine-tuning commands in folders, which may be ones, within pre-training runs too."""
    return list(dict.fromkeys(found for folder in named for found in find_below(folder, is_tuning, DEPTH + 1)))


def is_tuning(folder: Path) -> bool:
    """Whether a folder is that of a fine-tuning command."""
    return read_or(False, lambda: (folder / PLAN).is_file() or any(folder.glob(f"*/*/{BEGUN}")))


def read_tuning(folder: Path, now: float) -> TuningStatus:
    """Reads the status of a fine-tuning command."""
    names: dict[str, set[str]] = read_or({}, lambda: PLANNED.validate_python(read_table(folder / PLAN)))
    newest = read_time(folder / PLAN)
    for begun in folder.glob(f"*/*/{BEGUN}"):
        names.setdefault(begun.parts[-3], set()).add(begun.parts[-2])
        newest = max(newest, *(read_time(begun.with_name(name)) for name in (BEGUN, METRICS, RESULTS)))
    tasks = [_read_task(folder / task, runs) for task, runs in sorted(names.items())]
    state, why = _find_state(folder, tasks, newest, now)
    return TuningStatus(str(folder), state, why, tasks)


def _read_task(folder: Path, runs: set[str]) -> TaskStatus:
    results = {name: read_or(None, partial(RunResult.read, folder / name / RESULTS)) for name in sorted(runs)}
    done = {name: found for name, found in results.items() if found}
    scores = [found.score for found in done.values() if found.score is not None]
    metric = next((found.metric for found in done.values() if found.metric), "")
    begun = [name for name in runs - done.keys() if os.path.exists(folder / name / BEGUN)]
    at_work = {name: read_newest_lines(folder / name, ["step"]).get("step", {}) for name in begun}
    failed = sum(found.failed is not None for found in done.values())
    return TaskStatus(folder.name, len(runs), len(done), failed, metric, max(scores, default=None), at_work)


def _find_state(folder: Path, tasks: list[TaskStatus], newest: float, now: float) -> tuple[State, str]:
    left, ended = sum(task.planned - task.done for task in tasks), read_end(folder / ENDED, 0.0)
    if ended is not None and ended["seconds"] >= newest - 1.0:
        told = "" if ended["code"] == 0 else f": {explain_code(ended['code'])}: {ended['reason']}"
        return STATES.get(ended["code"], "failed"), format_age(now - ended["seconds"]) + told
    if left and (gone := find_deserter(folder / LOCK)):
        return "gone", f"{gone} has ended without a word; the same command goes on"
    if not left:
        return "stopped", "all runs that were begun are done; the command without --share, or gather.slurm, concludes"
    if now - newest > SILENT_SECONDS:
        return "silent", f"no line for {duration(now - newest)}, and no word of its end"
    return "running", ""


def build_tuning_panel(status: TuningStatus) -> RenderableType:
    """Builds the panel of a fine-tuning command: a line for each task, and for each run in progress."""
    done, planned = (sum(getattr(task, name) for task in status.tasks) for name in ("done", "planned"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("fine-tuning", Text(f"{done} of {planned} runs done"))
    for task in status.tasks:
        best = "" if task.best is None else f", best {task.metric} {100 * task.best:.1f}"
        failed = f", {task.failed} failed" if task.failed else ""
        table.add_row(Text(task.task), Text(f"{task.done} of {task.planned} runs{best}{failed}"))
        for name, line in sorted(task.at_work.items()):
            table.add_row("", Text(f"{name}: {_format_progress(line)}"))
    return frame_table(status.run, status.state, status.why, table)


def _format_progress(line: dict[str, Any]) -> str:
    if "step" not in line:
        return "begun"
    epoch = f", epoch {line['epoch']:.2f}" if line.get("epoch") is not None else ""
    return ", ".join([f"step {line['step']:,}{epoch}", *format_seconds_left(line.get("seconds_left"))])
