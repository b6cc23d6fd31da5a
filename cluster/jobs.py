"""The Slurm jobs of runs: what job scripts have noted of them in jobs.jsonl, and what the queue says of them now."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.sound import is_count, is_number

JOBS = "jobs.jsonl"
"""The file of a run's folder in which job scripts note every start and every end of the run."""
ANSWER_SECONDS = 5.0
"""A squeue that needs longer has a controller that does not answer."""


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
    events: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in (run / JOBS).read_bytes().splitlines():
            with suppress(ValueError, RecursionError):  # a line that is being written, or damaged
                events += [event] if is_event(event := json.loads(line)) else []
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    if not starts:
        return None
    last = notes_of(events)
    going = {event["job"]: event["event"] == "start" for event in events}
    others = [number for number in starts if going[events[number]["job"]] and events[number]["job"] != last.job]
    if last.code is None or not others:
        return last
    own = events[others[-1]]["job"]
    return replace(last, beside=notes_of([event for event in events if event["job"] == own]))


def is_event(event: Any) -> bool:
    """Whether this is the note of a start or an end."""
    if not isinstance(event, dict) or event.get("event") not in ("start", "end"):
        return False
    code = event.get("code", 0)
    return isinstance(event.get("job"), str) and is_number(event.get("time")) and is_count(code) and code < 256


def notes_of(events: list[dict[str, Any]]) -> JobNotes:
    """What these events say of their last start."""
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    last, ends = events[starts[-1]], [event for event in events[starts[-1] + 1 :] if event["event"] == "end"]
    return JobNotes(
        job=ends[-1]["job"] if ends else last["job"],
        started=float(last["time"]),
        restarts=len(starts) - 1,
        code=_code(ends),
        code_before=_code(events[starts[-2] : starts[-1]]) if len(starts) > 1 else None,
        ended=float(ends[-1]["time"]) if ends else None,
    )


def _code(events: list[dict[str, Any]]) -> int | None:
    """The exit code of the last end among these events."""
    codes = [event.get("code") for event in events if event["event"] == "end"]
    return codes[-1] if codes else None


@dataclass(frozen=True)
class Job:
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

    jobs: dict[str, Job] | None
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
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Queue(None, f"squeue did not answer within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return Queue(None, f"squeue: {error.strerror}")
    if done.returncode and "Invalid job id" not in done.stderr:  # so it calls a job that has ended some time ago
        told = done.stderr.strip() or f"exit code {done.returncode}"
        return Queue(None, f"squeue: {told.splitlines()[-1].removeprefix('squeue: ')}")
    rows = [line.strip().split("|") for line in done.stdout.splitlines()]
    return Queue({row[0]: Job(*row[:4], *no_null(row[4:])) for row in rows if len(row) in (4, 5)})


def no_null(words: list[str]) -> list[str]:
    """What squeue says, where it says something."""
    return ["" if word == "(null)" else word for word in words]
