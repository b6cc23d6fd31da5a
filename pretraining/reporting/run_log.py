"""Where the records of a run go: lines of JSON, TensorBoard's files, the console."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console
from rich.live import Live

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from pretraining.reporting.console import _panel, evaluation_line, step_line
from pretraining.reporting.records import EvaluationRecord, StepRecord

METRICS = "metrics.jsonl"


TENSORBOARD = "tensorboard"


class RunLog:
    """Where the records of a run go. On ranks other than 0 nowhere: make it there with `active=False`."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        total_steps: int,
        phases: int = 1,
        tensorboard: bool = True,
        first_step: int = 0,
        active: bool = True,
    ) -> None:
        """`total_steps` is 0 where the clock decides. `first_step` is the first that will be logged from now on: what
        the files say of it and later steps was written before a stop, and is cut away."""
        self._path, self._console = folder / METRICS, console
        self._total, self._phases, self._first, self._active = total_steps, phases, first_step, active
        self.tensorboard = tensorboard and active
        self._file: BinaryIO | None = None
        self._writer: Any = None
        self._live: Live | None = None

    def __enter__(self) -> RunLog:
        if not self._active:
            return self
        cut_metrics(self._path, self._first)
        with _as_user_error(self._path):
            self._file = self._path.open("ab")
        if self.tensorboard:
            self._writer = self._open_tensorboard()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            with _as_user_error("the console"):
                self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes all; a fault in that is told unless there is an error already."""
        try:
            for close in (self._live and self._live.stop, self._writer and self._writer.close):
                if close:
                    with _as_user_error("the log"):
                        close()
            if self._file:
                with _as_user_error(self._path):
                    self._file.close()
        except UserError:
            if kind is None:
                raise

    def step(self, record: StepRecord) -> None:
        """A logged step."""
        if not self._active:
            return
        self._write("step", asdict(record))
        self._add_scalars("train", record.step, asdict(record))
        if self._live is not None:
            with _as_user_error("the console"):
                self._live.update(_panel(record, self._total, self._phases, self._console.width), refresh=True)
        else:
            self._print(step_line(record, self._total))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Scores on held-out examples."""
        if not self._active:
            return
        figures = {**asdict(record), "perplexity": record.perplexity}
        self._write("evaluation", figures)
        self._add_scalars("validation", record.step, figures)
        self._print(evaluation_line(record))

    def sync(self) -> None:
        """Puts what was written on the disk: a checkpoint that follows must not be ahead of it after a power cut."""
        if self._file is not None:
            with _as_user_error(self._path):
                os.fsync(self._file.fileno())

    def histograms(self, name: str, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Distributions, in TensorBoard alone."""
        if self._writer is None:
            return
        with _as_user_error(self._path.parent / TENSORBOARD):
            for part, numbers in values.items():
                self._writer.add_histogram(f"{name}/{part}", np.asarray(numbers), step)
            self._writer.flush()

    def say(self, text: str) -> None:
        """A line for the reader alone."""
        if self._active:
            self._print(text)

    def _print(self, text: str) -> None:
        with _as_user_error("the console"):
            self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)
            self._console.file.flush()

    def _write(self, kind: str, figures: dict[str, Any]) -> None:
        assert self._file is not None, "open the log first"
        line = json.dumps({"kind": kind, **{name: _plain(value) for name, value in figures.items()}})
        with _as_user_error(self._path):
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def _open_tensorboard(self) -> Any:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError("TensorBoard is not installed\npip install tensorboard, or switch its logging off")
        from torch.utils.tensorboard import SummaryWriter

        folder = self._path.parent / TENSORBOARD
        with _as_user_error(folder):
            return SummaryWriter(str(folder), purge_step=self._first)

    def _add_scalars(self, group: str, step: int, figures: dict[str, Any]) -> None:
        if self._writer is None:
            return
        with _as_user_error(self._path.parent / TENSORBOARD):
            for name, value in figures.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(f"{group}/{name}", value, step)
            self._writer.flush()


@contextmanager
def _as_user_error(what: object) -> Iterator[None]:
    """A full disk or a closed pipe is told as what it is. (rich ends the program where a pipe is closed.)"""
    try:
        yield
    except (OSError, SystemExit) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "the reading end was closed"
        raise UserError(f"{what}: cannot be written: {reason}\nthe run can be continued from its checkpoint") from error


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_metrics(path: Path, first_step: int) -> None:
    """Leaves only the lines of steps before `first_step`, so that no step is there twice when it is done again."""
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    torn = lines.pop()  # what follows the last line's end: a line that was not finished
    kept = [line for number, line in enumerate(lines, 1) if line and _step_of(path, number, line) < first_step]
    if torn or len(kept) < len(lines):
        with replacing(path) as file:
            file.writelines(line + b"\n" for line in kept)


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}:{number}: no record of a step\nrepair the line, or move the file away") from error
