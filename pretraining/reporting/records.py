"""What pre-training tells of itself: the figures of a logged step, and the scores of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Group

from pretraining.reporting.console import cropped, left, number, progress
from pretraining.reporting.meter import Speed
from pretraining.reporting.run_log import Record

SUMS = ("masked", "next_sentence", "masked_correct", "next_sentence_correct")
"""What the model adds up over a batch: its two losses, and how often it was right in each."""
COUNTS = ("predictions", "sequences")
"""What the sums are divided by: the masked pieces, and the sequences."""


def mean_losses(totals: Mapping[str, float]) -> dict[str, float]:
    """Losses and accuracies, from the totals of `SUMS` and `COUNTS`."""
    predictions, sequences = (max(totals[name], 1) for name in COUNTS)
    return {
        "masked": totals["masked"] / predictions,
        "next_sentence": totals["next_sentence"] / sequences,
        "masked_accuracy": totals["masked_correct"] / predictions,
        "next_sentence_accuracy": totals["next_sentence_correct"] / sequences,
    }


@dataclass(frozen=True)
class StepRecord(Record):
    """The figures of a logged step, over all steps since the one logged before. None: not known, or not there."""

    kind: ClassVar[str] = "step"
    group: ClassVar[str] = "train"
    phase: int
    """The phase of the run, counted from 1."""
    loss: float
    """The sum of both losses."""
    masked: float
    """Masked-language-model loss of a predicted position, in nats."""
    next_sentence: float
    """Next-sentence loss of a sequence, in nats."""
    masked_accuracy: float
    next_sentence_accuracy: float
    learning_rate: float
    gradient_norm: float | None
    """The norm of the whole gradient before it was clipped."""
    loss_scale: float | None
    """What the loss is multiplied by; in fp16 alone."""
    speed: Speed
    total_steps: int = 0
    """Steps of the whole run; 0 where the clock decides. In no file."""
    phases: int = 1
    """Phases of the whole run. In no file."""

    @classmethod
    def of(cls, totals: Mapping[str, float], **known: Any) -> StepRecord:
        """The record of the steps that these are the totals of; `known` are its other fields."""
        losses = mean_losses(totals)
        known |= losses | {"loss": losses["masked"] + losses["next_sentence"]}
        return cls(**known)

    def figures(self) -> dict[str, float | None]:
        figures = {name: value for name, value in vars(self).items() if name not in ("speed", "total_steps", "phases")}
        return {**figures, **vars(self.speed)}

    def line(self) -> str:
        """At most 140 columns for the numbers that runs have."""
        total = self.total_steps
        parts = [
            f"{self.step:>{len(str(total))}}/{total}" if total else f"{self.step:>6}",
            f"loss {self.loss:.4f}",
            f"masked {self.masked:.4f} {self.masked_accuracy:5.1%}",
            f"next {self.next_sentence:.4f} {self.next_sentence_accuracy:5.1%}",
            *self._pace(),
        ]
        return "  ".join([*parts, *left(self.speed.seconds_left)])

    def panel(self, width: int) -> Group:
        """Three lines, for terminals of 80 columns and more."""
        phase = f"phase {self.phase} of {self.phases}  " if self.phases > 1 else ""
        losses = (
            f"loss {self.loss:.4f}   masked {self.masked:.4f} ({self.masked_accuracy:.1%} right)"
            f"   next {self.next_sentence:.4f} ({self.next_sentence_accuracy:.1%} right)"
        )
        pace = "  ".join([*self._pace(), f"{self.speed.memory / 1e9:.1f} GB"])
        head = progress(f"{phase}step", self.step, self.total_steps, self.speed.seconds_left, width)
        return Group(head, cropped(f"  {losses}"), cropped(f"  {pace}"))

    def _pace(self) -> list[str]:
        """Learning rate, speed and what else there is to tell of how the training goes."""
        return [
            f"rate {self.learning_rate:.2e}",
            *([] if self.gradient_norm is None else [f"norm {self.gradient_norm:.2f}"]),
            *([] if self.loss_scale is None else [f"scale {self.loss_scale:g}"]),
            f"{number(self.speed.pieces_per_second)} pieces/s",
            *([] if self.speed.utilisation is None else [f"use {self.speed.utilisation:.0%}"]),
            f"wait {self.speed.waiting:.0%}",
        ]


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """What the model scores on examples held out from training."""

    kind: ClassVar[str] = "evaluation"
    group: ClassVar[str] = "validation"
    phase: int
    """The phase of the run, counted from 1."""
    masked: float
    next_sentence: float
    masked_accuracy: float
    next_sentence_accuracy: float
    examples: int
    seconds: float
    """What the evaluation took."""

    @property
    def perplexity(self) -> float:
        """Among how many pieces the model hesitates at a masked position, on average."""
        return math.exp(min(self.masked, 700.0))

    def figures(self) -> dict[str, float | None]:
        return {**vars(self), "perplexity": self.perplexity}

    def line(self) -> str:
        return (
            f"validation {self.step}: masked {self.masked:.4f} {self.masked_accuracy:.1%}"
            f"  perplexity {self.perplexity:.2f}  next {self.next_sentence:.4f} {self.next_sentence_accuracy:.1%}"
        )
