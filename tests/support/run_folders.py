"""Folders of runs for tests: what job scripts note in them, runs that go on, status.py, and a pretended queue."""

import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import run_main, write_program

from cluster.panels import build_panel
from cluster.runs import JOBS, Queue, RunStatus, read_notes, read_run
from cluster.status import main
from data_prep.common.codes import ENDED
from data_prep.common.locks import LOCK
from pretraining.checkpoint.record import RECIPE
from pretraining.reporting.metrics_file import METRICS


def look(*words: object) -> str:
    """Calls status.py, which must end well, and returns what it prints, without the blanks at the ends of lines."""
    return re.sub(r" +$", "", run_main(main, *words), flags=re.MULTILINE)


def put_squeue(folder: Path, patch: pytest.MonkeyPatch, does: str) -> Path:
    """Puts a program called squeue on the path; returns the file in which it notes its arguments."""
    write_program(folder / "bin" / "squeue", f'echo "$@" >> {folder / "calls"}\n{does}')
    patch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return folder / "calls"


def status(run: Path, later: float = 0.0, queue: Queue | None = None) -> RunStatus:
    """Where a run stands, so many seconds from now."""
    return read_run(run, read_notes(run), queue or Queue(None), time.time() + later)


def shown(status: RunStatus, width: int) -> list[str]:
    """The lines of a run's panel in a terminal of this width."""
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=True, color_system=None).print(build_panel(status, width))
    return output.getvalue().splitlines()


def note(run: Path, *events: dict[str, Any], torn: str = "") -> None:
    """Notes what job scripts note."""
    run.mkdir(parents=True, exist_ok=True)
    (run / JOBS).write_text("".join(json.dumps(event) + "\n" for event in events) + torn)


def start(job: str, restart: int = 0, ago: float = 60.0) -> dict[str, Any]:
    fields = {"event": "start", "time": int(time.time() - ago), "job": job, "restart": restart}
    return {**fields, "nodes": "node[1-2]", "from": ""}


def end(job: str, code: int) -> dict[str, Any]:
    return {"event": "end", "time": int(time.time()), "job": job, "restart": 0, "code": code}


def make_running(run: Path) -> None:
    """Makes of a finished run one that has just written its last line, and does not know its end."""
    (run / ENDED).unlink(missing_ok=True)
    (run / LOCK).write_text("process 1 on another")
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    now = time.time()
    os.utime(run / RECIPE, (now - 100, now - 100))
    (run / METRICS).write_text("".join(json.dumps({**line, "time": now}) + "\n" for line in lines))
