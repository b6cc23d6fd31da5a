"""The records of a step and of an evaluation, and a log that takes them."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.reporting.meter import Speed
from pretraining.reporting.records import EvaluationRecord, StepRecord
from pretraining.reporting.run_log import RunLog

FIGURES = {
    "masked_loss": 5.842,
    "masked_accuracy": 0.123,
    "next_loss": 0.6901,
    "next_accuracy": 0.551,
    "next_larger_class": 0.513,
}
HELD_OUT = MLM.score(
    {"masked_loss": 5.8, "masked_accuracy": 0.12, "next_loss": 0.69, "next_accuracy": 0.55, "next_larger_class": 0.52}
)
RECORD = StepRecord(
    step=12000,
    phase=1,
    loss=6.5321,
    learns=FIGURES,
    said=MLM.describe_figures(FIGURES),
    learning_rate=1e-4,
    gradient_norm=1.234,
    loss_scale=None,
    examples_seen=3_072_000,
    pieces_seen=345_678_901,
    speed=Speed(
        pieces_per_second=123456.0,
        padded_pieces_per_second=150000.0,
        flops_utilisation=0.613,
        waiting_for_data=0.003,
        peak_memory_bytes=3_200_000_000,
        seconds_per_step=2.5,
        seconds_left=7400.0,
    ),
    total_steps=900_000,
)
SCORES = EvaluationRecord(
    step=12000,
    phase=1,
    learns=HELD_OUT,
    said=MLM.describe_figures(HELD_OUT),
    scored_examples=1000,
    evaluation_seconds=3.0,
)


PLAIN: dict[str, Any] = {"tensorboard": False, "first_step": 0, "active": True, "name": ""}


def open_log(folder: Path, console: Console | None = None, **options: Any) -> RunLog:
    return RunLog(folder, console or Console(file=io.StringIO()), **{**PLAIN, **options})
