"""The average of a run's last checkpoints: the mean of each weight, in fp32.

It needs the memory of two models, and reads the weights of each checkpoint once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import read_json, write_json
from pretraining.checkpoint.reading import find_fault, list_parameter_sizes, read_each_together, read_weights
from pretraining.checkpoint.record import AVERAGE, WEIGHT, find_checkpoint, list_finished, parse_step, read_record
from pretraining.huggingface.weights import check_finite
from pretraining.model.shape import Shape
from pretraining.processes.group import gather, place
from pretraining.reporting.records import EvaluationRecord


@dataclass(frozen=True)
class Average:
    """Which checkpoints an average is of, and how it does on held-out examples."""

    steps: tuple[int, ...]
    """steps of the checkpoints, the last one last"""
    loss: float | None = None
    """loss of the average; None if it was not scored"""
    last_loss: float | None = None
    """loss of the last checkpoint alone"""
    scores: EvaluationRecord | None = None

    @property
    def is_better(self) -> bool:
        """Whether its loss is lower than that of the last checkpoint."""
        return self.loss is not None and self.last_loss is not None and self.loss < self.last_loss

    def __str__(self) -> str:
        """Describes the average and its losses in one line."""
        steps = ", ".join(f"{step:,}" for step in self.steps)
        average = f"the average of {len(self.steps)} checkpoints, of steps {steps}"
        if self.loss is None or self.last_loss is None:
            return f"{average}, was not compared with the last one on held-out examples"
        result = "better" if self.is_better else "no better"
        losses = f"loss {self.loss:.4f}, of the last one {self.last_loss:.4f}"
        return f"{average}, is {result} on held-out examples: {losses}"

    def write(self, run: Path) -> None:
        """Writes it into the folder of a run."""
        scores = None if self.scores is None else self.scores.figures()
        write_json(run / AVERAGE, {**vars(self), "scores": scores})

    @classmethod
    def read(cls, run: Path) -> Average | None:
        """Reads what a run found of an average; None if it found nothing."""
        if not (run / AVERAGE).exists():
            return None
        content: Any = read_json(run / AVERAGE)
        scores = EvaluationRecord.from_figures(content["scores"]) if content["scores"] else None
        return cls(tuple(content["steps"]), content["loss"], content["last_loss"], scores)


def find_average(run: Path, count: int | None) -> Average | None:
    """Finds the average of this many last checkpoints of a run, with what the run found of it; None if there is only
    one checkpoint, or none is wanted."""
    steps = tuple(map(parse_step, list_alike(run, count))) if count else ()
    found = Average.read(run)
    return None if len(steps) < 2 else found if found and found.steps == steps else Average(steps)


def list_alike(run: Path, most: int) -> list[Path]:
    """Lists the newest checkpoints of a run, `most` at most, that have the same weights as the last one, which is the
    last here."""
    newest = read_record(find_checkpoint(run)).shape
    alike: list[Path] = []
    for checkpoint in reversed(list_finished(run)):
        if len(alike) == most or read_record(checkpoint).shape != newest:
            break
        alike.insert(0, checkpoint)
    return alike


def average_last(run: Path, count: int) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Returns the steps of this many last checkpoints of a run, and the means of their weights; one process does it."""
    alike = list_alike(run, count)
    return tuple(map(parse_step, alike)), dict(_average_weights(alike))


def average_together(run: Path, shape: Shape, count: int) -> tuple[tuple[int, ...], Iterator[tuple[str, Tensor]]]:
    """Returns the steps and the means as `average_last` does, of all checkpoints of this shape if they are fewer than
    `count`. Rank 0 computes all means before the first is yielded; all ranks call it, and iterate, together."""
    there, fault = list[str](), None
    if place()[0] == 0:
        try:
            there = [str(path) for path in list_alike(run, count)]
        except UserError as error:
            fault = str(error)
    paths, sizes = [Path(path) for path in gather(there, fault)[0]], list_parameter_sizes(shape)
    return tuple(map(parse_step, paths)), read_each_together(partial(_average_weights, paths), sizes)


def _average_weights(checkpoints: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yields the mean of each weight of checkpoints that have the same weights, after checking their files."""
    sizes = list_parameter_sizes(read_record(checkpoints[-1]).shape)
    means: dict[str, Tensor] = {}
    for number, checkpoint in enumerate(checkpoints, 1):
        if fault := find_fault(checkpoint, beginning=f"{WEIGHT}-"):
            raise DamageError(f"{fault}\nan average needs it whole: remove {checkpoint}, or leave the average out")
        weights = read_weights(checkpoint, sizes)
        check_finite(str(checkpoint), weights)
        means = {name: means[name].lerp_(weight, 1 / number) for name, weight in weights.items()} if means else weights
    yield from means.items()
