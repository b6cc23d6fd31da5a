"""The records of a step and of an evaluation, and a log that takes them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from pretraining.reporting.meter import Speed
from pretraining.reporting.records import EvaluationRecord, StepRecord
from pretraining.reporting.run_log import RunLog

RECORD = StepRecord(
    step=12000,
    phase=1,
    loss=6.5321,
    masked=5.842,
    next_sentence=0.6901,
    masked_accuracy=0.123,
    next_sentence_accuracy=0.551,
    learning_rate=1e-4,
    gradient_norm=1.234,
    loss_scale=None,
    speed=Speed(
        pieces_per_second=123456.0,
        padded_per_second=150000.0,
        utilisation=0.613,
        waiting=0.003,
        memory=3_200_000_000,
        seconds=2.5,
        seconds_left=7400.0,
    ),
    total_steps=900_000,
)
SCORES = EvaluationRecord(12000, 1, 5.8, 0.69, 0.12, 0.55, 1000, 3.0)


def open_log(folder: Path, console: Console | None = None, **options: Any) -> RunLog:
    return RunLog(folder, console or Console(file=io.StringIO()), **{"tensorboard": False, **options})
