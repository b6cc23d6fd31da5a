"""Writes the records of a run to metrics.jsonl, TensorBoard's files and the console."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from data_prep.common import unread
from data_prep.common.errors import UserError
from data_prep.common.files import readable, refuse_link, replacing, writable
from pretraining.reporting.metrics_file import METRICS

TENSORBOARD = "tensorboard"
FIRST_SILENCE, LONGEST_SILENCE = 5.0, 60.0
"""Seconds of silence after which a line of progress is printed if the output is no terminal: at first, and at most.
They double in between."""

NUMBERS = itertools.count()
"""Numbers the files of this process: two may be opened in the same second."""


@dataclass(frozen=True)
class Record:
    """A record of a run after a step: figures for files, and lines for the console.

    Each kind of training derives its own records, whose fields are the figures.
    """

    kind: ClassVar[str]
    """Name of the kind in JSON."""
    group: ClassVar[str]
    """Group of its figures in TensorBoard, as GROUP/NAME."""
    no_curve: ClassVar[frozenset[str]] = frozenset({"step", "phase"})
    """Figures that make no useful curve and are not sent to TensorBoard."""
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

    def panel(self, width: int) -> RenderableType | None:  # noqa: ARG002
        """Draws what a terminal of this width shows until the next record; None: print a line instead."""
        return None


class News(Protocol):
    """The progress of a run between two records."""

    @property
    def has_news(self) -> bool:
        """Whether it has figures beyond the last record."""

    def line(self) -> str:
        """Formats the progress in one line of the console."""

    def panel(self, width: int) -> RenderableType:
        """Draws what a terminal of this width shows until the next progress or record."""


class EventFile:
    """A file of figures for TensorBoard. Steps from `first_step` on in older files beside it are hidden.

    It is written in the calling thread, so that a full disk raises an error there. TensorBoard's own writer uses a
    thread, which prints a traceback instead.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        if util.find_spec("tensorboard") is None:
            raise UserError("TensorBoard is not installed\npip install tensorboard, or switch its logging off")
        self._folder = folder
        self._kinds: Any = import_module("torch.utils.tensorboard.writer")
        record_writer: Any = import_module("tensorboard.summary.writer.record_writer")
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS)}"
        start = self._kinds.SessionLog(status=self._kinds.SessionLog.START)
        with _as_user_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._records = record_writer.RecordWriter((folder / name).open("wb"))
        self._write({"file_version": "brain.Event:2"}, {"step": first_step, "session_log": start})

    def scalars(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Adds the figures that are not None, each under its name."""
        known = {name: value for name, value in figures.items() if value is not None}
        self._write(*({"step": step, "summary": self._kinds.scalar(*figure)} for figure in known.items()))

    def text(self, name: str, step: int, content: str) -> None:
        """Adds a text as a block of code: TensorBoard renders Markdown."""
        block = "".join(f"    {line}\n" for line in content.splitlines())
        self._write({"step": step, "summary": self._kinds.text(name, block)})

    def close(self) -> None:
        with _as_user_error("the log"):
            self._records.close()

    def _write(self, *events: dict[str, Any]) -> None:
        """Writes events with these fields."""
        with _as_user_error(self._folder):
            for event in events:
                self._records.write(self._kinds.Event(wall_time=time.time(), **event).SerializeToString())
            self._records.flush()


class RunLog:
    """Writes the records of a run. With `active=False`, as on ranks other than 0, it writes nothing."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        tensorboard: bool = True,
        first_step: int = 0,
        active: bool = True,
        name: str = "",
    ) -> None:
        """`first_step`: the first step that will be logged; entries of it and later steps, from before a stop, are
        removed. `name`: for runs that share a console; it precedes every line, and records that would be shown as a
        panel are written to the files only."""
        self._path, self._events_folder, self._console = folder / METRICS, folder / TENSORBOARD, console
        self._first, self._active, self._name = first_step, active, name
        self._noted = 0
        self._last: dict[str, int] = {}
        self.tensorboard = tensorboard and active
        self._file: BinaryIO | None = None
        self._events: EventFile | None = None
        self._live: Live | None = None
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
                self._events = EventFile(self._events_folder, self._first)
                opened.callback(self._events.close)
            if self._console.is_terminal and not self._name:
                self._live = Live(console=self._console, refresh_per_second=2, transient=True)
                with _as_user_error("the console"):
                    self._live.start()
                opened.callback(_as_user_error("the log")(self._live.stop))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes all files; an error in that is raised unless there is one already."""
        try:
            self._opened.close()
        except UserError:
            if kind is None:
                raise

    def write(self, record: Record) -> None:
        """Writes a record to the file, to TensorBoard and to the console."""
        if not self._active:
            return
        plain = {name: _drop_infinite(value) for name, value in record.figures().items()}
        self._write_line({"kind": record.kind, **plain, "time": round(time.time(), 3)})
        if self._events is not None:
            self._events.scalars(record.step, record.curves())
        panel = record.panel(self._console.width) if self._live is not None or self._name else None
        if self._live is not None and panel is not None:
            with _as_user_error("the console"):
                self._live.update(panel, refresh=True)
        elif panel is None:
            self.say(record.line())
        self._note_lost_readers(record.step)

    def show(self, news: News) -> None:
        """Shows progress between two records, in no file. A terminal shows all; elsewhere a line is printed after the
        first step, and then after ever longer silence."""
        if self._live is not None:
            with _as_user_error("the console"):
                self._live.update(news.panel(self._console.width))
        elif not self._name and news.has_news and time.monotonic() - self._last_line >= self._silence:
            self._silence = min(LONGEST_SILENCE, max(FIRST_SILENCE, 2 * self._silence))
            self.say(news.line())

    def sync(self) -> None:
        """Syncs the file to the disk, so that after a power cut it is not behind the next checkpoint."""
        if self._file is not None:
            with _as_user_error(self._path):
                os.fsync(self._file.fileno())

    def text(self, name: str, content: str) -> None:
        """Adds a text to TensorBoard."""
        if self._events is not None:
            self._events.text(name, self._first, content)

    def say(self, text: str) -> None:
        """Prints a line that is in no file."""
        if self._active:
            text = f"{self._name}  {text}" if self._name else text
            with _as_user_error("the console"):  # a whole line, in one write
                self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)
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
