"""The Slurm jobs of runs: the notes of job scripts in jobs.jsonl, and the current state in the queue."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from data_prep.common.files import open_at_once

JOBS = "jobs.jsonl"
"""The file in a run's folder to which job scripts append every start and end of the run."""
ANSWER_SECONDS = 5.0
"""Time limit of squeue, whose controller may not answer."""
LARGEST = 1e18
"""The largest step, time or figure of a run that is taken as valid."""


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
    except subprocess.TimeoutExpired:
        return Queue(None, f"squeue did not answer within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return Queue(None, f"squeue: {error.strerror}")
    if done.returncode and "Invalid job id" not in done.stderr:  # so it calls a job that has ended some time ago
        told = done.stderr.strip() or f"exit code {done.returncode}"
        return Queue(None, f"squeue: {told.splitlines()[-1].removeprefix('squeue: ')}")
    rows = [line.strip().split("|") for line in done.stdout.splitlines()]
    return Queue({row[0]: QueuedJob(*row) for row in rows if len(row) == 4})
