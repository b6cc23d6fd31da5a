"""Writes the records of a run to metrics.jsonl, TensorBoard's files and the console."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from rich.console import Console

from data_prep.common import unread
from data_prep.common.errors import UserError
from data_prep.common.files import readable, refuse_link, replacing, writable
from pretraining.reporting.metrics_file import METRICS

TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's files in runs that version 1.0 has begun."""
FIRST_SILENCE, LONGEST_SILENCE = 5.0, 60.0
"""Seconds of silence after which a line of progress is printed: at first, and at most. They double in between."""


@dataclass(frozen=True)
class LogRecord:
    """A record of a run after a step: figures for files, and lines for the console.

    Each kind of training derives its own records, whose fields are the figures.
    """

    kind: ClassVar[str]
    """Name of the kind in JSON."""
    group: ClassVar[str]
    """Group of its figures in TensorBoard, as GROUP/NAME."""
    no_curve: ClassVar[frozenset[str]] = frozenset({"step", "phase"})
    """Figures that make no useful curve and are not sent to TensorBoard."""
    is_frequent: ClassVar[bool] = False
    """Whether runs that share a console leave it to the files."""
    step: int
    """Optimizer steps that the run has done."""

    def figures(self) -> dict[str, float | None]:
        """Returns the figures for files; None: unknown, or does not exist."""
        return dict(vars(self))

    def curves(self) -> dict[str, float | None]:
        """Returns the figures for TensorBoard, by the names shown there."""
        return {f"{self.group}/{name}": value for name, value in self.figures().items() if name not in self.no_curve}

    def line(self) -> str:
        """Formats the record in one line of the console."""
        raise NotImplementedError


class RunLog:
    """Writes the records of a run. With `active=False`, as on ranks other than 0, it writes nothing."""

    def __init__(
        self, folder: Path, console: Console, *, tensorboard: bool, first_step: int, active: bool, name: str
    ) -> None:
        """`first_step`: the first step that will be logged; entries of it and later steps, from before a stop, are
        removed. `name`: for runs that share a console; it precedes every line, and frequent records are written
        to the files only."""
        self._path, self._events_folder, self._console = folder / METRICS, find_events_folder(folder), console
        self._first, self._active, self._name = first_step, active, name
        self._noted = 0
        self._last: dict[str, int] = {}
        self.tensorboard = tensorboard and active
        self._file: BinaryIO | None = None
        self._events: Any = None
        self._silence, self._last_line = 0.0, time.monotonic()
        self._opened = ExitStack()

    def keep(self, kind: str, last_step: int) -> None:
        """Sets, before the log is opened, the last step up to which records of a kind are kept."""
        self._last[kind] = last_step

    def __enter__(self) -> RunLog:
        if not self._active:
            return self
        cut_metrics(self._path, self._first, self._last)
        with ExitStack() as opened:
            with _as_user_error(self._path):
                self._file = open(self._path, "ab", opener=refuse_link)
            opened.callback(_as_user_error(self._path)(self._file.close))
            if self.tensorboard:
                self._events = self._open_events()
                opened.callback(_as_user_error(self._events_folder)(self._events.close))
            self._opened = opened.pop_all()
        return self

    def _open_events(self) -> Any:
        """Opens a file for TensorBoard. Steps from the first on in older files beside it are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        with _as_user_error(self._events_folder):
            return SummaryWriter(str(self._events_folder), purge_step=self._first)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes all files; an error in that is raised unless there is one already."""
        try:
            self._opened.close()
        except UserError:
            if kind is None:
                raise

    def write(self, record: LogRecord) -> None:
        """Writes a record to the file, to TensorBoard and to the console."""
        if not self._active:
            return
        plain = {name: _drop_infinite(value) for name, value in record.figures().items()}
        self._write_line({"kind": record.kind, **plain, "time": round(time.time(), 3)})
        if self._events is not None:
            with _as_user_error(self._events_folder):
                for name, value in record.curves().items():
                    if value is not None:
                        self._events.add_scalar(name, value, record.step)
                self._events.flush()
        if not (self._name and record.is_frequent):
            self.say(record.line())
        self._note_lost_readers(record.step)

    def show(self, line: str | None) -> None:
        """Prints a line of progress between two records, in no file: after the first step, and then after ever longer
        silence."""
        if not self._name and line is not None and time.monotonic() - self._last_line >= self._silence:
            self._silence = min(LONGEST_SILENCE, max(FIRST_SILENCE, 2 * self._silence))
            self.say(line)

    def sync(self) -> None:
        """Syncs the file to the disk, so that after a power cut it is not behind the next checkpoint."""
        if self._file is not None:
            with _as_user_error(self._path):
                os.fsync(self._file.fileno())

    def say(self, text: str) -> None:
        """Prints a line that is in no file."""
        if self._active:
            text = f"{self._name}  {text}" if self._name else text
            with _as_user_error("the console"):  # a whole line, in one write
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
                self._console.file.flush()
            self._last_line = time.monotonic()

    def _note_lost_readers(self, step: int) -> None:
        """Notes in the file that the reader of the output is gone."""
        for text in unread.notes[self._noted :]:
            self._write_line({"kind": "note", "step": step, "text": text, "time": round(time.time(), 3)})
        self._noted = len(unread.notes)

    def _write_line(self, content: Mapping[str, Any]) -> None:
        assert self._file is not None, "open the log first"
        with _as_user_error(self._path):
            self._file.write(json.dumps(content).encode() + b"\n")
            self._file.flush()


_as_user_error = partial(writable, cure="\nthe run can be continued from its checkpoint")
"""Converts an OSError, as of a full disk, into a UserError."""


def find_events_folder(run: Path) -> Path:
    """Finds the folder of TensorBoard's files: that of the run, whose name TensorBoard then shows."""
    return run / TENSORBOARD if (run / TENSORBOARD).exists() else run


def _drop_infinite(value: float | None) -> float | None:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_metrics(path: Path, first_step: int, last_steps: Mapping[str, int] = {}) -> None:
    """Removes the lines of `first_step` and later steps, which will be logged again; of the kinds in `last_steps`, also
    those after the given step."""
    if not path.exists():
        return
    with readable(path):
        lines = path.read_bytes().split(b"\n")
    torn = lines.pop()  # what follows the last newline: an unfinished line
    kept = []
    for number, line in enumerate(lines, 1):
        if line:
            kind, step = _parse_kind_and_step(path, number, line)
            kept += [line] if step < first_step and step <= last_steps.get(kind, step) else []
    if torn or len(kept) < len(lines):
        with replacing(path) as file:
            file.writelines(line + b"\n" for line in kept)


def _parse_kind_and_step(path: Path, number: int, line: bytes) -> tuple[str, int]:
    try:
        record = json.loads(line)
        return str(record.get("kind")), int(record["step"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}:{number}: no record of a step\nrepair the line, or move the file away") from error
