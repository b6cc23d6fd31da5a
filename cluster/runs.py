"""Reads the status of pre-training runs from their folders, on any machine that sees the files, without torch; and of
their Slurm jobs, from the notes of job scripts in jobs.jsonl and from the queue."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from data_prep.common.codes import ENDED, Code, explain_code
from data_prep.common.errors import UserError
from data_prep.common.files import absence, open_at_once, read_table
from data_prep.common.locks import LOCK, find_deserter
from data_prep.common.progress import duration
from data_prep.common.reading import leave_out_removed
from data_prep.common.toml_text import read_toml
from finetuning.results import BEGUN, RESULTS
from pretraining.checkpoint.record import RECIPE, RECORD, list_finished, parse_step
from pretraining.config.settings import Recipe
from pretraining.reporting.metrics_file import METRICS, read_newest_records
from pretraining.training.skips import read_skips

Value = TypeVar("Value")
State = Literal["queued", "starting", "running", "silent", "gone", "done", "stopped", "failed"]
STATES: dict[int, State] = {Code.DONE: "done", Code.STOPPED: "stopped", Code.INTERRUPTED: "stopped"}
"""The states of runs that ended with these codes; all others have failed."""
LINES = ("step", "evaluation")
COUNTS = ("step", "phase")
"""Keys of metrics.jsonl that have whole numbers."""
DEPTH = 3
"""The number of levels below a named folder that are searched for runs."""
LATE, LATE_SECONDS = 3, 120.0
"""A run is silent if its next line takes LATE times as long as lines usually do, and at least LATE_SECONDS."""
SKEW_SECONDS = 5.0
"""How far the clocks of machines may differ: an end that is older than the last line by more is out of date."""
LARGEST = 1e18
"""The largest step, time or figure of a run that is taken as valid."""
JOBS = "jobs.jsonl"
"""The file in a run's folder to which job scripts append every start and end of the run."""
ANSWER_SECONDS = 5.0
"""Time limit of squeue, whose controller may not answer."""


@dataclass(frozen=True)
class Event:
    """A line of jobs.jsonl."""

    event: Literal["start", "end"]
    time: Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
    job: Annotated[str, Field(strict=True)]
    code: Annotated[int | None, Field(strict=True, ge=0, lt=256)] = None
    """the exit code of an end"""


EVENT = TypeAdapter(Event)


@dataclass(frozen=True)
class JobNotes:
    """A summary of the starts of a run in jobs.jsonl."""

    job: str
    """the job of the last start: 123, or 123_4 of an array"""
    started: float
    """when the last start was, in seconds since 1970"""
    restarts: int
    """starts after the first"""
    code: int | None
    """the exit code of the last start; None where no end was noted"""
    code_before: int | None
    """the exit code of the start before it; None where no end was noted"""
    ended: float | None = None
    """when the last start ended; None where no end was noted"""


def read_notes(run: Path) -> JobNotes | None:
    """Reads the notes of job scripts in a run's folder; None for a run that was started without them."""
    events: list[Event] = []
    with suppress(OSError), open(run / JOBS, "rb", opener=open_at_once) as file:
        for line in file.read().splitlines():
            with suppress(ValueError):  # a line that is being written, or damaged
                events.append(EVENT.validate_json(line))
    starts = [number for number, event in enumerate(events) if event.event == "start"]
    if not starts:
        return None
    last, end = events[-1], events[-1].event == "end"
    return JobNotes(
        job=last.job,
        started=events[starts[-1]].time,
        restarts=len(starts) - 1,
        code=last.code if end else None,
        code_before=events[starts[-1] - 1].code if len(starts) > 1 else None,
        ended=last.time if end else None,
    )


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue."""

    job: str
    state: str
    """as Slurm names it: RUNNING, PENDING, COMPLETING, …"""
    reason: str
    """why it waits: Resources, Priority, Dependency, …; "None" if it does not"""
    nodes: str
    """such as node[1-2]; empty while it waits"""


@dataclass(frozen=True)
class Queue:
    """The answer of squeue."""

    jobs: dict[str, QueuedJob] | None
    """jobs that wait or run, by id; None if there is no squeue, or it fails"""
    fault: str = ""
    """why squeue gave no answer; empty if it did, or is not installed"""


def ask_queue(jobs: Collection[str]) -> Queue:
    """Asks squeue for the state of jobs, in one call."""
    ids = ",".join(sorted(job for job in jobs if re.fullmatch(r"\d+(_\d+)?", job, re.ASCII)))
    if not ids or shutil.which("squeue") is None:
        return Queue(None)
    command = ["squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%i|%T|%r|%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        return Queue(None, f"squeue did not answer: {error}")
    if done.returncode and "Invalid job id" not in done.stderr:  # so it calls a job that has ended some time ago
        return Queue(None, done.stderr.strip() or f"squeue: exit code {done.returncode}")
    rows = [line.strip().split("|") for line in done.stdout.splitlines()]
    return Queue({row[0]: QueuedJob(*row) for row in rows if len(row) == 4})


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
    state: State = "running"
    why: str = ""
    """the reason for the state, in words"""


CURE = (
    "name the folder that train.py had as --out, or one above it; jobs that wait have none yet: squeue --me shows them"
)


def find_runs(*named: Path) -> list[Path]:
    """Finds the runs in folders, which may be runs themselves, the newest of each last. UserError if there is no such
    folder."""
    found: dict[Path, None] = {}
    for folder in named:
        if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
            why = absence(folder, "folder") if not os.path.isdir(folder) else "permission denied"
            raise UserError(f"{folder}: {why}" + f"\n{CURE}" * (why == "no such folder"))
        runs = find_below(folder, is_run, DEPTH)
        found |= dict.fromkeys(sorted(runs, key=lambda run: max(read_time(run / name) for name in (METRICS, JOBS))))
    return list(found)


def find_below(folder: Path, is_wanted: Callable[[Path], bool], depth: int) -> Iterator[Path]:
    """Yields a folder that is wanted, or else those below it. Folders within one that is wanted are not searched."""
    if is_wanted(folder):
        yield folder
    elif depth:
        inside: list[Path] = read_or([], lambda: sorted(path for path in folder.iterdir() if path.is_dir()))
        for inner in inside:
            yield from find_below(inner, is_wanted, depth - 1)


def is_run(folder: Path) -> bool:
    """Whether a folder is one of pre-training: runs of fine-tuning have metrics too, but no recipe and no phases."""
    if not any(os.path.exists(folder / name) for name in (METRICS, JOBS)):  # Path.exists raises in others' folders
        return False
    if os.path.exists(folder / RECIPE):
        return True
    if folder.parent.name == "jobs":  # where a job of fine-tuning notes its starts
        return False
    if (folder / METRICS).exists():
        return any("phase" in line for line in read_newest_lines(folder).values())
    return not (folder / RESULTS).exists() and not any(folder.glob(f"*/*/{BEGUN}"))


def read_run(run: Path, notes: JobNotes | None, queue: Queue, now: float) -> RunStatus:
    """Reads the status of a run. `notes` and `queue` describe its jobs; `now` is in seconds since 1970."""
    lines, recipe = read_newest_lines(run), read_or(Recipe(), lambda: read_recipe(run / RECIPE))
    line, evaluation = (lines.get(kind, {}) for kind in LINES)
    written = max((line.get("time") or read_time(run / METRICS) for line in lines.values()), default=None)
    oldest_end = (written or 0.0) - SKEW_SECONDS
    if notes and notes.ended is not None and notes.ended < oldest_end:  # of a second job, while the first one goes on
        notes = None
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
        ended=read_end(run / ENDED, max(started, oldest_end)),
    )
    gone = find_deserter(run / LOCK) if read_time(run / LOCK) >= started else None
    state, why = find_state(status, recipe, queue, gone, max(started, read_time(run / RECIPE)), now)
    return replace(status, state=state, why=why)


def find_state(
    status: RunStatus, recipe: Recipe, queue: Queue, gone: str | None, begun: float, now: float
) -> tuple[State, str]:
    """Finds the state of a run, and the reason in words.

    `gone` names the process of the run if it has ended; `begun` is the time of the last start by its files.
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
    if age is None or age > now - begun:
        since, is_late = duration(max(0.0, now - begun)), now - begun > recipe.guards.hang
        return ("silent", f"no line in the {since} since its start") if is_late else ("starting", f"since {since}")
    if age > compute_patience(status.last_line, status.last_evaluation, recipe):
        return "silent", f"no line for {duration(age)}, and no word of its end"
    return "running", ""


def compute_patience(line: dict[str, Any], evaluation: dict[str, Any], recipe: Recipe) -> float:
    """Seconds without a line after which a run is silent: a multiple of what a line and an evaluation take."""
    if line.get("seconds_per_step") is None:  # there is none yet
        return recipe.guards.hang
    between_lines: float = line["seconds_per_step"] * recipe.logging.every
    return max(LATE_SECONDS, LATE * (between_lines + (evaluation.get("evaluation_seconds") or 0.0)))


def format_age(seconds: float) -> str:
    """Formats a number of seconds as a time ago."""
    return f"{duration(max(0.0, seconds))} ago"


def read_or(default: Value, read: Callable[[], Value]) -> Value:
    """Reads something of a run; returns the default if it is missing, damaged, or may not be read."""
    try:
        return read()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return default


def read_recipe(path: Path) -> Recipe:
    """Reads the recipe of a run."""
    with open(path, encoding="utf-8", opener=open_at_once) as file:
        return Recipe.model_validate(leave_out_removed(Recipe, read_toml(file.read()))[0])


def read_end(path: Path, started: float) -> dict[str, Any] | None:
    """Reads how a run has ended, with `seconds` since 1970. None if it has not, or if it ended before `started`."""
    ended: dict[str, Any] = read_or({}, lambda: read_table(path))
    seconds = read_or(-1.0, lambda: datetime.fromisoformat(ended["time"]).timestamp())
    sound = is_count(ended.get("code")) and isinstance(ended.get("reason"), str)
    return {**ended, "seconds": seconds} if sound and seconds >= started else None


def read_newest_lines(run: Path, kinds: Collection[str] = LINES) -> dict[str, dict[str, Any]]:
    """Reads the last record of each kind in metrics.jsonl, without values that are not valid numbers."""
    found: dict[str, dict[str, Any]] = read_or({}, lambda: read_newest_records(run / METRICS, kinds))
    for kind, record in found.items():
        sound = {name: is_count(value) if name in COUNTS else is_figure(value) for name, value in record.items()}
        found[kind] = {name: value for name, value in record.items() if name == "kind" or sound[name]}
    return found


def is_figure(value: Any) -> bool:
    """Whether a value is None or a number of at most LARGEST: files may be damaged, or of another version."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST)


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0."""
    return isinstance(value, int) and is_figure(value) and value >= 0


def read_time(path: Path) -> float:
    """The modification time of a file in seconds since 1970; 0 if it is missing."""
    return read_or(0.0, lambda: path.stat().st_mtime)
