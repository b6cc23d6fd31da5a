"""Reads the status of pre-training runs from their folders, on any machine that sees the files, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from cluster.jobs import JOBS, LARGEST, JobNotes, Queue, QueuedJob
from data_prep.common.codes import ENDED, Code, explain_code
from data_prep.common.errors import UserError
from data_prep.common.files import absence, is_stream, open_at_once, read_table
from data_prep.common.locks import LOCK, find_deserter
from data_prep.common.progress import duration
from data_prep.common.toml_text import read_toml
from finetuning.results import BEGUN, RESULTS
from pretraining.checkpoint.record import RECIPE, RECORD, list_finished, parse_step
from pretraining.config.settings import Recipe
from pretraining.objectives.reports import list_loss_curves
from pretraining.reporting.metrics_file import METRICS, read_newest_records, read_step_records
from pretraining.training.skips import read_skips

Value = TypeVar("Value")
State = Literal["queued", "starting", "running", "silent", "gone", "done", "stopped", "failed"]
STATES: dict[int, State] = {Code.DONE: "done", Code.STOPPED: "stopped", Code.INTERRUPTED: "stopped"}
"""The states of runs that ended with these codes; all others have failed."""
LINES = ("step", "evaluation")
COUNTS = ("step", "phase")
FIGURES = (
    *("time", "loss", "seconds_per_step", "seconds_left", "evaluation_seconds"),
    *list_loss_curves(),
    *("pieces_per_second", "flops_utilisation", "waiting_for_data", "epoch", "items_per_second"),
)
"""Keys of metrics.jsonl that have numbers."""
DEPTH = 3
"""The number of levels below a named folder that are searched for runs."""
PLACES = 200
"""The number of records that are read of a long metrics.jsonl for its curve."""
LATE, LATE_SECONDS = 3, 120.0
"""A run is silent if its next line takes LATE times as long as lines usually do, and at least LATE_SECONDS."""
SKEW_SECONDS = 5.0
"""How far the clocks of machines may differ: an end that is older than the last line by more is out of date."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. Unknown values are None or empty."""

    run: str
    phase: int
    """number of the current phase, from 1"""
    phases: int
    """number of phases in the recipe; 0 if unknown"""
    phase_name: str | None
    length: int | None
    step: int
    total_steps: int
    """steps of all phases; 0 if unknown, or if the clock ends the run"""
    last_line: dict[str, Any]
    """the last record of a step in metrics.jsonl"""
    last_evaluation: dict[str, Any]
    """the last record of an evaluation"""
    last_line_age: float | None
    """seconds since the later of both"""
    checkpoint: int | None
    """the step of the last checkpoint"""
    checkpoint_age: float | None
    rollbacks: list[str]
    """the reason of each rollback to a checkpoint"""
    notes: JobNotes | None
    """notes of the job scripts; None for a run that they did not start"""
    job: QueuedJob | None
    """the job of the last start, if it waits or runs"""
    ended: dict[str, Any] | None
    """content of ended.json: code, reason, rank, time"""
    losses: list[tuple[int, float]]
    """steps with their training losses: all of them, or a sample"""
    state: State = "running"
    why: str = ""
    """the reason for the state, in words"""


CURE = (
    "name the folder that train.py had as --out, or one above it; jobs that wait have none yet: squeue --me shows them"
)


def find_runs(named: Path) -> list[Path]:
    """Finds the runs in a folder, which may be a run itself, the newest last. UserError if there is no such folder."""
    if not os.path.isdir(named) or not os.access(named, os.R_OK | os.X_OK):
        found = absence(named, "folder") if not os.path.isdir(named) else "permission denied"
        raise UserError(f"{named}: {found}" + f"\n{CURE}" * (found == "no such folder"))
    return sorted(_runs_below(named, DEPTH), key=lambda run: max(read_time(run / name) for name in (METRICS, JOBS)))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yields a folder that is a run, or else the runs below it. Folders within a run are not searched."""
    if is_run(folder):
        yield folder
    elif depth:
        for inner in list_folders(folder):
            yield from _runs_below(inner, depth - 1)


def list_folders(folder: Path) -> list[Path]:
    """Lists the folders in a folder by name; none if it may not be read."""
    return read_or([], lambda: sorted(path for path in folder.iterdir() if path.is_dir()))


def is_run(folder: Path) -> bool:
    """Whether a folder is one of pre-training: runs of fine-tuning have metrics too, but no recipe and no phases."""
    if not any(os.path.exists(folder / name) for name in (METRICS, JOBS)):  # Path.exists raises in others' folders
        return False
    if os.path.exists(folder / RECIPE) or is_stream(folder / METRICS):
        return True
    if folder.parent.name == "jobs":  # where a job of fine-tuning notes its starts
        return False
    lines = newest_lines(folder).values()
    if lines or (folder / METRICS).exists():
        return any("phase" in line for line in lines)
    return not (folder / RESULTS).exists() and not any(folder.glob(f"*/*/{BEGUN}"))


def find_pipes(run: Path) -> list[Path]:
    """Finds pipes and devices that have the names of a run's files, and reads none: a reader might wait for ever."""
    return [run / name for name in (METRICS, JOBS, RECIPE, LOCK) if is_stream(run / name)]


def read_run(run: Path, notes: JobNotes | None, queue: Queue, now: float) -> RunStatus:
    """Reads the status of a run. `notes` and `queue` describe its jobs; `now` is in seconds since 1970."""
    lines, recipe = newest_lines(run), read_or(Recipe(), lambda: read_recipe(run / RECIPE))
    line, evaluation = (lines.get(kind, {}) for kind in LINES)
    written = max((line.get("time") or read_time(run / METRICS) for line in lines.values()), default=None)
    if notes and notes.beside and is_going_on(notes, queue, written, compute_patience(line, evaluation, recipe)):
        notes = notes.beside
    started = notes.started if notes else 0.0
    phase = line.get("phase", 1)
    settings = recipe.phases[phase - 1] if 0 < phase <= len(recipe.phases) else None
    checkpoint = max(list_finished(run), key=parse_step, default=None)
    status = RunStatus(
        run=str(run),
        phase=phase,
        phases=len(recipe.phases),
        phase_name=settings.name if settings else None,
        length=settings.length if settings else None,
        step=max(line.get("step", 0), parse_step(checkpoint) if checkpoint else 0),
        total_steps=sum(recipe.phase_steps() or ()),
        last_line=line,
        last_evaluation=evaluation,
        last_line_age=None if written is None else max(0.0, now - written),
        checkpoint=parse_step(checkpoint) if checkpoint else None,
        checkpoint_age=max(0.0, now - read_time(checkpoint / RECORD)) if checkpoint else None,
        rollbacks=read_or([], lambda: [str(skip.reason) for skip in read_skips(run)]),
        notes=notes,
        job=(queue.jobs or {}).get(notes.job) if notes else None,
        ended=read_end(run / ENDED, max(started, (written or 0.0) - SKEW_SECONDS)),
        losses=read_or([], lambda: read_losses(run)) if lines else [],
    )
    gone = find_deserter(run / LOCK) if read_time(run / LOCK) >= started else None
    state, why = judge(status, recipe, queue, gone, max(started, read_time(run / RECIPE)), written, now)
    return replace(status, state=state, why=why)


def is_going_on(notes: JobNotes, queue: Queue, written: float | None, wait: float) -> bool:
    """Whether an earlier job still works on the run, so that the last one was refused. The queue says so; without one,
    the time of the last line does."""
    is_there = notes.beside is not None and notes.beside.job in (queue.jobs or {})
    if written is None or notes.ended is None:
        return is_there
    return is_there or written > notes.ended + 1.0 or (queue.jobs is None and written > notes.ended - wait)


def compute_patience(line: dict[str, Any], evaluation: dict[str, Any], recipe: Recipe) -> float:
    """Seconds without a line after which a run is silent: a multiple of what a line and an evaluation take."""
    if line.get("seconds_per_step") is None:  # there is none yet
        return recipe.guards.hang
    between_lines: float = line["seconds_per_step"] * recipe.logging.every
    evaluation_seconds: float = evaluation.get("evaluation_seconds", 0.0)
    return max(LATE_SECONDS, LATE * (between_lines + evaluation_seconds))


def judge(
    status: RunStatus, recipe: Recipe, queue: Queue, gone: str | None, begun: float, written: float | None, now: float
) -> tuple[State, str]:
    """Returns the state of a run, and the reason in words.

    `gone` names the process of the run if it has ended; `begun` is the time of the last start by its files, and
    `written` that of its last line.
    """
    job, notes, age = status.job, status.notes, status.last_line_age
    if job is not None and job.state == "PENDING":
        return "queued", f"({job.reason})"
    if status.ended is not None:
        code, when = status.ended["code"], format_age(now - status.ended["seconds"])
        if code == Code.DONE and status.step < status.total_steps:
            return "stopped", f"{when}, where it was told to stop"
        return STATES.get(code, "failed"), when
    if notes is not None and notes.code is not None:
        why = f"job {notes.job} has ended with {explain_code(notes.code)}; its output says why"
        return STATES.get(notes.code, "failed"), why
    if gone is not None:
        return "gone", f"{gone} has ended without a word; the same command goes on from the last checkpoint"
    if notes is not None and queue.jobs is not None and job is None:
        return "silent", f"job {notes.job} is not in the queue, and noted no end"
    if age is None or written is None or written < begun:
        since, is_late = duration(max(0.0, now - begun)), now - begun > recipe.guards.hang
        return ("silent", f"no line in the {since} since its start") if is_late else ("starting", f"since {since}")
    if age > compute_patience(status.last_line, status.last_evaluation, recipe):
        return "silent", f"no line for {duration(age)}, and no word of its end"
    return "running", ""


def format_age(seconds: float) -> str:
    """Formats a number of seconds as a time ago."""
    days = int(seconds // 86400)
    return f"{days} days ago" if days >= 2 else f"{duration(max(0.0, seconds))} ago"


def read_or(default: Value, read: Callable[[], Value]) -> Value:
    """Reads something of a run; returns the default if it is missing, damaged, or may not be read."""
    try:
        return read()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return default


def read_recipe(path: Path) -> Recipe:
    """Reads the recipe of a run."""
    with open(path, encoding="utf-8", opener=open_at_once) as file:
        return Recipe.model_validate(read_toml(file.read()))


def read_end(path: Path, started: float) -> dict[str, Any] | None:
    """Reads how a run has ended, with `seconds` since 1970. None if it has not, or if it ended before `started`."""
    ended: dict[str, Any] = read_or({}, lambda: read_table(path))
    seconds = read_or(-1.0, lambda: datetime.fromisoformat(ended["time"]).timestamp())
    sound = is_count(ended.get("code")) and isinstance(ended.get("reason"), str)
    return {**ended, "seconds": seconds} if sound and seconds >= started else None


def read_losses(run: Path) -> list[tuple[int, float]]:
    """Reads the curve of the training loss."""
    curve = [(logged.step, logged.figures["loss"]) for logged in read_step_records(run / METRICS, PLACES)]
    return [(step, loss) for step, loss in curve if is_count(step) and is_number(loss)]


def newest_lines(run: Path, kinds: Collection[str] = LINES) -> dict[str, dict[str, Any]]:
    """Reads the last record of each kind in metrics.jsonl, without values that are not valid numbers."""
    found: dict[str, dict[str, Any]] = read_or({}, lambda: read_newest_records(run / METRICS, kinds))
    for record in found.values():
        for name in [*FIGURES, *COUNTS]:
            if not (is_count if name in COUNTS else is_number)(record.get(name, 0)):
                del record[name]
    return found


def is_number(value: Any) -> bool:
    """Whether a value is a number of at most LARGEST: files may be damaged, or of another version."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0."""
    return isinstance(value, int) and is_number(value) and value >= 0


def read_time(path: Path) -> float:
    """The modification time of a file in seconds since 1970; 0 if it is missing."""
    return read_or(0.0, lambda: path.stat().st_mtime)
