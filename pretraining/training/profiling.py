"""A profile of some steps of a run: a trace to open in a browser, and a table of what took the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

FOLDER, TRACE, TABLE = "profile", "trace.json.gz", "table.txt"
SKIPPED, ROWS = 2, 40
"""The first steps are skipped, which compile and allocate; the table has so many rows."""


def profile_steps(run: Path, steps: int, device: torch.device, say: Callable[[str], None]) -> profile:
    """A context in which steps are profiled; whoever trains calls its `step` after each of them."""

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
