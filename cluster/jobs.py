"""The Slurm jobs of runs: what job scripts have noted of them in jobs.jsonl, and what the queue says of them now."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

JOBS = "jobs.jsonl"
"""The file of a run's folder in which job scripts note every start and every end of the run."""
ANSWER_SECONDS = 5.0
"""A squeue that needs longer has a controller that does not answer."""
LARGEST = 1e12
"""No step, time or figure of a run is larger."""


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
    """What jobs.jsonl says of the starts of a run."""

    job: str
    """the job of the last start: 123, or 123_4 of an array"""
    started: float
    """when the last start was, in seconds since 1970"""
    restarts: int
    """starts after the first"""
    code: int | None
    """the exit code of the last start; None where no end was noted"""
    code_before: int | None
    """the exit code of the start before it, likewise"""
    ended: float | None = None
    """when the last start ended; None where no end was noted"""
    beside: JobNotes | None = None
    """what is known of an earlier job that has noted no end: where it goes on, the last start was refused"""


def read_notes(run: Path) -> JobNotes | None:
    """What job scripts have noted of a run; None for one that was started without them."""
    events: list[Event] = []
    with suppress(OSError):
        for line in (run / JOBS).read_bytes().splitlines():
            with suppress(ValueError):  # a line that is being written, or damaged
                events.append(EVENT.validate_json(line))
    if not any(event.event == "start" for event in events):
        return None
    last = notes_of(events)
    going = {event.job: event.event == "start" for event in events}
    others = [event.job for event in events if event.event == "start" and going[event.job] and event.job != last.job]
    if last.code is None or not others:
        return last
    return replace(last, beside=notes_of([event for event in events if event.job == others[-1]]))


def notes_of(events: list[Event]) -> JobNotes:
    """What these events say of their last start."""
    starts = [number for number, event in enumerate(events) if event.event == "start"]
    last, end = events[starts[-1]], events[-1] if events[-1].event == "end" else None
    before = events[starts[-1] - 1] if len(starts) > 1 else None
    return JobNotes(
        job=end.job if end else last.job,
        started=last.time,
        restarts=len(starts) - 1,
        code=end.code if end else None,
        code_before=before.code if before else None,
        ended=end.time if end else None,
    )


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue has it."""

    job: str
    state: str
    """RUNNING, PENDING, COMPLETING, … as Slurm calls it"""
    reason: str
    """why it waits: Resources, Priority, Dependency, …; None where it does not"""
    nodes: str
    """node[1-2]; empty where it waits"""
    excluded: str = ""
    """the nodes that it must not have"""


@dataclass(frozen=True)
class Queue:
    """What squeue says of some jobs."""

    jobs: dict[str, QueuedJob] | None
    """those that wait or run, by their ids; None where nothing is known, since there is no squeue, or it fails"""
    fault: str = ""
    """why squeue has said nothing, where it should have"""


def ask_queue(jobs: Collection[str]) -> Queue:
    """Asks squeue once for all these jobs."""
    ids = ",".join(sorted(job for job in jobs if re.fullmatch(r"\d+(_\d+)?", job, re.ASCII)))
    if not ids or shutil.which("squeue") is None:
        return Queue(None)
    command = ["squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%i|%T|%r|%N|%x"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return Queue(None, f"squeue did not answer within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return Queue(None, f"squeue: {error.strerror}")
    if done.returncode and "Invalid job id" not in done.stderr:  # so it calls a job that has ended some time ago
        told = done.stderr.strip() or f"exit code {done.returncode}"
        return Queue(None, f"squeue: {told.splitlines()[-1].removeprefix('squeue: ')}")
    rows = [line.strip().split("|") for line in done.stdout.splitlines()]
    rows = [[*row[:4], *(nodes.replace("(null)", "") for nodes in row[4:])] for row in rows]
    return Queue({row[0]: QueuedJob(*row) for row in rows if len(row) in (4, 5)})
