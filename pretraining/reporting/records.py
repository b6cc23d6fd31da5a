"""The records of pre-training: the figures of a logged step, and the scores of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pretraining.reporting.console import format_number, format_seconds_left
from pretraining.reporting.meter import Speed
from pretraining.reporting.run_log import LogRecord

IN_NO_FILE = ("speed", "learns", "said", "total_steps")
"""Fields of records that are split up for files, or only printed."""


@dataclass(frozen=True)
class LearningRecord(LogRecord):
    """A record of pre-training, with the figures of its objective."""

    phase: int
    """The phase of the run, counted from 1."""
    learns: Mapping[str, float]
    """The figures of the objective."""

    def figures(self) -> dict[str, float | None]:
        return {**{name: value for name, value in vars(self).items() if name not in IN_NO_FILE}, **self.learns}


@dataclass(frozen=True)
class StepRecord(LearningRecord):
    """The figures of the steps since the last logged one. None: unknown, or does not exist."""

    kind: ClassVar[str] = "step"
    group: ClassVar[str] = "train"
    no_curve: ClassVar[frozenset[str]] = frozenset({"step", "phase", "seconds_left"})
    loss: float
    """The loss that is minimised."""
    learning_rate: float
    gradient_norm: float | None
    """Norm of the whole gradient before clipping."""
    loss_scale: float | None
    """Scale of the loss; in fp16 only."""
    speed: Speed
    examples_seen: int = 0
    """Examples that the run has trained on so far, over all ranks, with repetitions."""
    pieces_seen: int = 0
    """Pieces of these examples, without padding."""
    total_steps: int = 0
    """Steps of the whole run; 0 by the clock. In no file."""
    said: Sequence[str] = field(default=(), compare=False)
    """The figures of the objective in words of the console."""

    def figures(self) -> dict[str, float | None]:
        return {**super().figures(), **vars(self.speed)}

    def line(self) -> str:
        """Formats the record in one line of at most 165 columns."""
        learned = [format_steps(self.step, self.total_steps), f"loss {self.loss:.4f}", *self.said]
        return "  ".join([*learned, *self._pace(), *format_seconds_left(self.speed.seconds_left)])

    def _pace(self) -> list[str]:
        """Formats learning rate, norm, loss scale and speed."""
        use = self.speed.flops_utilisation
        return [
            f"lr {self.learning_rate:.2e}",
            *([] if self.gradient_norm is None else [f"norm {self.gradient_norm:.2f}"]),
            *([] if self.loss_scale is None else [f"scale {self.loss_scale:g}"]),
            f"{format_number(self.speed.pieces_per_second)} pieces/s",
            *([] if use is None else [f"use {use:.0%}" + " (of a peak measured too low)" * (use > 1)]),
            f"wait {self.speed.waiting_for_data:.0%}",
        ]


def format_steps(step: int, total: int) -> str:
    """Formats the number of steps done, padded to the width of the total."""
    return f"{step:>{len(str(total))}}/{total}" if total else f"{step:>6}"


def describe_progress(
    step: int, total: int, next_record: int, pieces_per_second: float | None, seconds_left: float | None
) -> str | None:
    """Formats the progress between two records in one line, with the step of the next one; None before a step is done.
    The speed of all ranks and the time left are estimates."""
    if pieces_per_second is None:
        return None
    pace, follow = f"{format_number(pieces_per_second)} pieces/s", f"losses follow at step {next_record:,}"
    return "  ".join([format_steps(step, total), pace, *format_seconds_left(seconds_left), follow])


@dataclass(frozen=True)
class EvaluationRecord(LearningRecord):
    """The scores of the model on held-out examples."""

    kind: ClassVar[str] = "evaluation"
    group: ClassVar[str] = "validation"
    no_curve: ClassVar[frozenset[str]] = frozenset({"step", "phase", "scored_examples", "evaluation_seconds"})
    scored_examples: int
    """Examples that were scored, over all ranks."""
    evaluation_seconds: float
    """Seconds of the evaluation."""
    said: Sequence[str] = field(default=(), compare=False)
    """The figures of the objective in words of the console."""

    @classmethod
    def from_figures(cls, figures: Mapping[str, float]) -> EvaluationRecord:
        """The record of these figures, as `figures` gives them."""
        own = ("step", "phase", "scored_examples", "evaluation_seconds")
        step, phase, examples, seconds = (figures[name] for name in own)
        learns = {name: value for name, value in figures.items() if name not in own}
        return cls(int(step), int(phase), learns, int(examples), seconds)

    def join(self, later: EvaluationRecord) -> EvaluationRecord:
        """Joins these figures with those of a later evaluation at the same step."""
        learns = {**self.learns, **later.learns}
        seconds = self.evaluation_seconds + later.evaluation_seconds
        return replace(self, learns=learns, evaluation_seconds=seconds, said=[*self.said, *later.said])

    def line(self) -> str:
        return "  ".join([f"validation {self.step}: {self.said[0]}", *self.said[1:]])
