"""The Slurm jobs of runs: what job scripts have noted of them in jobs.jsonl, and what the queue says of them now."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def read_notes(run: Path) -> JobNotes | None:
    """What job scripts have noted of a run; None for one that was started without them."""
    events: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in (run / JOBS).read_bytes().splitlines():
            with suppress(ValueError, AttributeError):  # a line that is being written, or damaged
                events += [event] if (event := json.loads(line)).get("event") in ("start", "end") else []
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    if not starts:
        return None
    last = events[starts[-1]]
    return JobNotes(
        job=str(last.get("job", "")),
        started=float(last.get("time", 0)),
        restarts=len(starts) - 1,
        code=_code(events[starts[-1] + 1 :]),
        code_before=_code(events[starts[-2] : starts[-1]]) if len(starts) > 1 else None,
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


@dataclass(frozen=True)
class Queue:
    """What squeue says of some jobs."""

    jobs: dict[str, Job] | None
    """those that wait or run, by their ids; None where nothing is known, since there is no squeue, or it fails"""
    fault: str = ""
    """why squeue has said nothing, where it should have"""


def ask_queue(jobs: Collection[str]) -> Queue:
    """Asks squeue once for all these jobs."""
    ids = ",".join(sorted(filter(None, jobs)))
    if not ids or shutil.which("squeue") is None:
        return Queue(None)
    command = ["squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%i|%T|%r|%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Queue(None, f"squeue did not answer within {ANSWER_SECONDS:g} s")
    except OSError as error:
        return Queue(None, f"squeue: {error.strerror}")
    if done.returncode and "Invalid job id" not in done.stderr:  # so it calls a job that has ended some time ago
        told = done.stderr.strip() or f"exit code {done.returncode}"
        return Queue(None, f"squeue: {told.splitlines()[-1].removeprefix('squeue: ')}")
    rows = [line.strip().split("|") for line in done.stdout.splitlines()]
    return Queue({row[0]: Job(*row) for row in rows if len(row) == 4})
