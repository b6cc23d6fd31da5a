"""A profile of some steps of a run: a trace to open in a browser, and a table of what took the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

FOLDER, TRACE, TABLE = "profile", "trace.json", "table.txt"
SKIPPED = 3
"""The first steps of a run are not profiled: they compile, fill caches and allocate."""
ROWS = 40


class StepProfiler:
    """Profiles steps of one rank; with 0 steps it does nothing."""

    def __init__(self, run: Path, steps: int, device: torch.device, say: Callable[[str], None]) -> None:
        self._folder, self._left, self._device, self._say = run / FOLDER, steps, device, say
        self._seen = 0
        self._profile: profile | None = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes what there is of a profile when training ends before it is complete."""
        if self._profile is not None:
            self._write()

    def after_step(self, step: int) -> None:
        """Begins before the first profiled step, and writes after the last."""
        self._seen += 1
        if self._profile is not None:
            self._left -= 1
            if not self._left:
                self._write()
        elif self._left and self._seen >= SKIPPED:
            cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._profile.start()

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / TRACE))
        order = f"self_{self._device.type}_time_total"
        table = self._profile.key_averages().table(sort_by=order, row_limit=ROWS)
        (self._folder / TABLE).write_text(table)
        self._say(f"profile: {self._folder / TABLE}, and {TRACE} beside it for chrome://tracing or ui.perfetto.dev")
        self._profile, self._left = None, 0
