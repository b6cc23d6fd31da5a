"""Runs of pre-training as their folders show them: to anyone, on any machine that sees the files, and without torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from cluster.jobs import JOBS, LARGEST, JobNotes, Queue, QueuedJob
from data_prep.common.codes import ENDED, Code, explained
from data_prep.common.errors import UserError
from data_prep.common.files import absence, read_json
from data_prep.common.locks import LOCK, deserter
from data_prep.common.progress import duration
from data_prep.common.toml_text import read_toml
from finetuning.results import BEGUN, RESULTS
from pretraining.checkpoint.record import RECIPE, RECORD, list_finished, parse_step
from pretraining.config.settings import Recipe
from pretraining.objectives.declaration import loss_curves
from pretraining.reporting.metrics_file import METRICS, read_newest_records, read_step_records
from pretraining.training.skips import read_skips

State = Literal["queued", "starting", "running", "silent", "gone", "done", "stopped", "failed"]
STATES: dict[int, State] = {Code.DONE: "done", Code.STOPPED: "stopped", Code.INTERRUPTED: "stopped"}
"""The states of runs that ended with these codes; all others have failed."""
LINES = ("step", "evaluation")
COUNTS = ("step", "phase")
FIGURES = (
    *("time", "loss", "seconds_per_step", "seconds_left", "evaluation_seconds"),
    *loss_curves(),
    *("pieces_per_second", "flops_utilisation", "waiting_for_data", "epoch", "items_per_second"),
)
"""What is a number in lines of metrics.jsonl."""
DEPTH = 3
"""Levels of folders in which runs are looked for below the one that is named."""
PLACES = 200
"""Places at which a long metrics.jsonl is read for its curve."""
LATE, LATE_SECONDS = 3, 120.0
"""A run is silent where its next line takes so many times as long as lines do, and so many seconds at least."""


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands; what is not known or not there is None, or empty."""

    run: str
    state: State
    why: str
    """the reason for the state, in words"""
    phase: int
    """the phase, counted from 1"""
    phases: int
    """how many the recipe has; 0 where that is not known"""
    phase_name: str | None
    length: int | None
    step: int
    total_steps: int
    """steps of all phases; 0 where that is not known, or the clock decides"""
    last_line: dict[str, Any]
    """the last line of a step in metrics.jsonl, as it is there"""
    last_evaluation: dict[str, Any]
    """the last line of an evaluation, likewise"""
    last_line_age: float | None
    """seconds since the later of both"""
    checkpoint: int | None
    """the step of the last checkpoint"""
    checkpoint_age: float | None
    rollbacks: list[str]
    """what went wrong each time that the run went back to a checkpoint"""
    notes: JobNotes | None
    """what job scripts have noted; None for a run that they did not start"""
    job: QueuedJob | None
    """the job of the last start, where it waits or runs"""
    ended: dict[str, Any] | None
    """what ended.json says: code, reason, rank, time"""
    losses: list[tuple[int, float]]
    """steps with their training losses: all of them, or a sample"""


CURE = (
    "name the folder that train.py had as --out, or one above it; jobs that wait have none yet: squeue --me shows them"
)


def find_runs(named: Path) -> list[Path]:
    """The run that a folder is, or those below it, the newest last; UserError where there is no such folder."""
    if not os.path.isdir(named) or not os.access(named, os.R_OK | os.X_OK):
        found = absence(named, "folder") if not os.path.isdir(named) else "permission denied"
        raise UserError(f"{named}: {found}" + f"\n{CURE}" * (found == "no such folder"))
    return sorted(_runs_below(named, DEPTH), key=lambda run: max(_modified(run / name) for name in (METRICS, JOBS)))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """A folder that is a run, or the runs below it; what lies in a run belongs to that."""
    if is_run(folder):
        yield folder
    elif depth:
        for inner in folders_in(folder):
            yield from _runs_below(inner, depth - 1)


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder by their names; none where it is somebody else's."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.is_dir())
    return []


def is_run(folder: Path) -> bool:
    """Whether a folder is one of pre-training: runs of fine-tuning have metrics too, but no recipe and no phases."""
    if not any(os.path.exists(folder / name) for name in (METRICS, JOBS)):  # Path.exists raises in others' folders
        return False
    if os.path.exists(folder / RECIPE):
        return True
    if folder.parent.name == "jobs":  # where a job of fine-tuning notes its starts
        return False
    lines = newest_lines(folder).values()
    if lines or (folder / METRICS).exists():
        return any("phase" in line for line in lines)
    return not (folder / RESULTS).exists() and not any(folder.glob(f"*/*/{BEGUN}"))


def read_run(run: Path, notes: JobNotes | None, queue: Queue, now: float) -> RunStatus:
    """Reads where a run stands; `notes` and `queue` say what is known of its jobs, `now` is in seconds since 1970."""
    lines, recipe = newest_lines(run), read_recipe(run / RECIPE)
    line, evaluation = (lines.get(kind, {}) for kind in LINES)
    written = max((line.get("time") or _modified(run / METRICS) for line in lines.values()), default=None)
    if (
        notes is not None
        and notes.beside is not None
        and goes_on(notes, queue, written, patience(line, evaluation, recipe))
    ):
        notes = notes.beside
    started = notes.started if notes else 0.0
    phase = line.get("phase", 1)
    settings = recipe.phases[phase - 1] if 0 < phase <= len(recipe.phases) else None
    checkpoint = max(list_finished(run), key=parse_step, default=None)
    status = RunStatus(
        run=str(run),
        state="running",
        why="",
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
        checkpoint_age=max(0.0, now - _modified(checkpoint / RECORD)) if checkpoint else None,
        rollbacks=_rollbacks(run),
        notes=notes,
        job=(queue.jobs or {}).get(notes.job) if notes else None,
        ended=read_end(run / ENDED, started),
        losses=_losses(run) if lines else [],
    )
    gone = deserter(run / LOCK) if _modified(run / LOCK) >= started else None
    begun = max(started, _modified(run / RECIPE))
    state, why = judge(status, recipe, queue, gone, begun, written, now)
    return replace(status, state=state, why=why)


def goes_on(notes: JobNotes, queue: Queue, written: float | None, wait: float) -> bool:
    """Whether the job beside the last one works on, in whose folder that one was refused. Where no queue says so, its
    last line, for as long as no next one is due."""
    is_there = notes.beside is not None and notes.beside.job in (queue.jobs or {})
    if written is None or notes.ended is None:
        return is_there
    return is_there or written > notes.ended + 1.0 or (queue.jobs is None and written > notes.ended - wait)


def patience(line: dict[str, Any], evaluation: dict[str, Any], recipe: Recipe) -> float:
    """Seconds that may go by without a line: some times what lines take, and an evaluation."""
    if line.get("seconds_per_step") is None:  # there is none yet
        return recipe.guards.hang
    between_lines: float = line["seconds_per_step"] * recipe.logging.every
    evaluation_seconds: float = evaluation.get("evaluation_seconds", 0.0)
    return max(LATE_SECONDS, LATE * (between_lines + evaluation_seconds))


def judge(
    status: RunStatus, recipe: Recipe, queue: Queue, gone: str | None, begun: float, written: float | None, now: float
) -> tuple[State, str]:
    """Whether a run waits, trains, has fallen silent or has ended, and what there is to say of that.

    `gone` is the process that worked here, where it is known to be gone; `begun` is when the run was last started, as
    far as its files tell, and `written` when its last line was.
    """
    job, notes, age = status.job, status.notes, status.last_line_age
    if job is not None and job.state == "PENDING":
        return "queued", f"({job.reason})"
    if status.ended is not None:
        code, when = status.ended["code"], ago(now - status.ended["seconds"])
        if code == Code.DONE and status.step < status.total_steps:
            return "stopped", f"{when}, where it was told to stop"
        return STATES.get(code, "failed"), when
    if notes is not None and notes.code is not None:
        why = f"job {notes.job} has ended with {explained(notes.code)}; its output says why"
        return STATES.get(notes.code, "failed"), why
    if gone is not None:
        return "gone", f"{gone} has ended without a word; the same command goes on from the last checkpoint"
    if notes is not None and queue.jobs is not None and job is None:
        return "silent", f"job {notes.job} is not in the queue, and noted no end"
    if age is None or written is None or written < begun:
        since, is_late = duration(max(0.0, now - begun)), now - begun > recipe.guards.hang
        return ("silent", f"no line in the {since} since its start") if is_late else ("starting", f"since {since}")
    if age > patience(status.last_line, status.last_evaluation, recipe):
        return "silent", f"no line for {duration(age)}, and no word of its end"
    return "running", ""


def ago(seconds: float) -> str:
    """How long something has been over."""
    days = int(seconds // 86400)
    return f"{days} days ago" if days >= 2 else f"{duration(max(0.0, seconds))} ago"


def read_recipe(path: Path) -> Recipe:
    """The recipe of a run; one without phases where it cannot be read."""
    try:
        return Recipe.model_validate(read_toml(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return Recipe()


def read_end(path: Path, started: float) -> dict[str, Any] | None:
    """How a run has ended, with `seconds` since 1970; None where it has not, or was started since."""
    try:
        ended: dict[str, Any] = read_json(path)
        ended["seconds"] = datetime.fromisoformat(ended["time"]).timestamp()
        sound = is_count(ended["code"]) and isinstance(ended["reason"], str)
    except (OSError, UserError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return ended if sound and ended["seconds"] >= started else None


def _rollbacks(run: Path) -> list[str]:
    with suppress(UserError):  # damaged: the run's next start says so
        return [str(skip.reason) for skip in read_skips(run)]
    return []


def _losses(run: Path) -> list[tuple[int, float]]:
    with suppress(OSError):
        curve = [(logged.step, logged.figures["loss"]) for logged in read_step_records(run / METRICS, PLACES)]
        return [(step, loss) for step, loss in curve if is_count(step) and is_number(loss)]
    return []


def newest_lines(run: Path, kinds: Collection[str] = LINES) -> dict[str, dict[str, Any]]:
    """The last line of these kinds in metrics.jsonl, without those of its figures and counts that are none."""
    try:
        found = read_newest_records(run / METRICS, kinds)
    except OSError:
        return {}
    for record in found.values():
        for name in [*FIGURES, *COUNTS]:
            if not (is_count if name in COUNTS else is_number)(record.get(name, 0)):
                del record[name]
    return found


def is_number(value: Any) -> bool:
    """Whether something is a number that means something: files may be damaged, or of another version."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_count(value: Any) -> bool:
    """Whether something is a whole number from 0 on."""
    return isinstance(value, int) and is_number(value) and value >= 0


def _modified(path: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 where it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
