"""Profiles some steps of a run: writes a trace for a browser, and a table of the operators by time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

FOLDER, TRACE, TABLE = "profile", "trace.json.gz", "table.txt"
SKIPPED, ROWS = 2, 40
"""First steps, which compile and allocate, are not profiled; rows of the table."""


def profile_steps(run: Path, steps: int, device: torch.device, say: Callable[[str], None]) -> profile:
    """Returns a context that profiles steps; the trainer calls its `step` after each one."""

    def write(done: profile) -> None:
        folder = run / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(folder / TRACE))
            table = done.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=ROWS)
            (folder / TABLE).write_text(table)
        except (OSError, RuntimeError) as error:  # training goes on without it
            say(f"no profile: {folder} cannot be written: {error}")
        else:
            say(f"profile: {folder / TABLE}, and {TRACE} beside it for chrome://tracing or ui.perfetto.dev")

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    when = schedule(wait=SKIPPED, warmup=1, active=steps, repeat=1)
    return profile(activities=activities, schedule=when, on_trace_ready=write)
