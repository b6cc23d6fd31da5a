"""Writes TensorBoard's files in the calling thread, so that a full disk raises an error there.

TensorBoard's own writer uses a thread, which prints a traceback instead.
"""

from __future__ import annotations

import itertools
import operator
import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common.errors import UserError

POWERS = itertools.accumulate(itertools.repeat(1.1), operator.mul, initial=1e-12)
LIMITS = list(itertools.takewhile(lambda power: power < 1e20, POWERS))
BINS = [*(-limit for limit in reversed(LIMITS)), 0.0, *LIMITS]
"""TensorBoard's limits of histogram bins: finer near 0."""
NUMBERS = itertools.count()
"""Numbers the files of this process: two may be opened in the same second."""


class EventFile:
    """A file of figures for TensorBoard. Steps from `first_step` on in older files beside it are hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        if util.find_spec("tensorboard") is None:
            raise UserError("TensorBoard is not installed\npip install tensorboard, or switch its logging off")
        self._kinds: Any = import_module("torch.utils.tensorboard.writer")
        record_writer: Any = import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS)}"
        self._records = record_writer.RecordWriter((folder / name).open("wb"))
        self._add(file_version="brain.Event:2")
        self._add(step=first_step, session_log=self._kinds.SessionLog(status=self._kinds.SessionLog.START))
        self._records.flush()

    def scalars(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Adds the figures that are not None, each under its name."""
        for name, value in figures.items():
            if value is not None:
                self._add(step=step, summary=self._kinds.scalar(name, value))
        self._records.flush()

    def histograms(self, group: str, step: int, samples: Mapping[str, Sequence[float]]) -> None:
        """Adds the distribution of each sample as GROUP/NAME."""
        for name, values in samples.items():
            self._add(step=step, summary=self._kinds.histogram(f"{group}/{name}", np.asarray(values), BINS))
        self._records.flush()

    def text(self, name: str, step: int, content: str) -> None:
        """Adds a text as a block of code: TensorBoard renders Markdown."""
        block = "".join(f"    {line}\n" for line in content.splitlines())
        self._add(step=step, summary=self._kinds.text(name, block))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add(self, **content: Any) -> None:
        self._records.write(self._kinds.Event(wall_time=time.time(), **content).SerializeToString())
