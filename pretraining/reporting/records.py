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

COUNTS = ("predictions", "sequences")
"""What the sums of a batch are divided by: the masked pieces, and the sequences."""
NEXT_SENTENCE = ("next_loss", "next_accuracy")
"""The figures that a model without next-sentence prediction does not have."""


def mean_losses(totals: Mapping[str, float]) -> dict[str, float]:
    """Losses and accuracies, from the totals of what the model adds up and of `COUNTS`."""
    predictions, sequences = (max(totals[name], 1) for name in COUNTS)
    masked = {
        "masked_loss": totals["masked"] / predictions,
        "masked_accuracy": totals["masked_correct"] / predictions,
    }
    if "next_sentence" not in totals:
        return masked
    return masked | {
        "next_loss": totals["next_sentence"] / sequences,
        "next_accuracy": totals["next_sentence_correct"] / sequences,
    }


def there(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    """The figures without those of next-sentence prediction where the model does none."""
    return {name: value for name, value in figures.items() if value is not None or name not in NEXT_SENTENCE}


@dataclass(frozen=True)
class StepRecord(Record):
    """The figures of a logged step, over all steps since the one logged before. None: not known, or not there."""

    kind: ClassVar[str] = "step"
    group: ClassVar[str] = "train"
    no_curve: ClassVar[frozenset[str]] = frozenset({"step", "phase", "seconds_left"})
    phase: int
    """The phase of the run, counted from 1."""
    loss: float
    """What is minimised: the sum of the losses of the heads."""
    masked_loss: float
    """Masked-language-model loss of a predicted position, in nats."""
    masked_accuracy: float
    """Share of the predicted positions where the model's first choice is the piece that stood there."""
    learning_rate: float
    gradient_norm: float | None
    """The norm of the whole gradient before it was clipped."""
    loss_scale: float | None
    """What the loss is multiplied by; in fp16 alone."""
    speed: Speed
    next_loss: float | None = None
    """Next-sentence loss of a sequence, in nats."""
    next_accuracy: float | None = None
    """Share of the sequences of which the model says rightly whether B follows A."""
    examples_seen: int | None = None
    """Examples that the run has trained on so far, over all ranks; one that came again counts again."""
    pieces_seen: int | None = None
    """Pieces of these examples, without padding."""
    total_steps: int = 0
    """Steps of the whole run; 0 where the clock decides. In no file."""
    phases: int = 1
    """Phases of the whole run. In no file."""

    @classmethod
    def of(cls, totals: Mapping[str, float], **known: Any) -> StepRecord:
        """The record of the steps that these are the totals of; `known` are its other fields."""
        losses = mean_losses(totals)
        known |= losses | {"loss": losses["masked_loss"] + losses.get("next_loss", 0.0)}
        return cls(**known)

    def figures(self) -> dict[str, float | None]:
        figures = {name: value for name, value in vars(self).items() if name not in ("speed", "total_steps", "phases")}
        return there({**figures, **vars(self.speed)})

    def line(self) -> str:
        """At most 140 columns for the numbers that runs have."""
        total = self.total_steps
        parts = [
            f"{self.step:>{len(str(total))}}/{total}" if total else f"{self.step:>6}",
            f"loss {self.loss:.4f}",
            f"masked {self.masked_loss:.4f} {self.masked_accuracy:5.1%}",
            *([] if self.next_loss is None else [f"next {self.next_loss:.4f} {self.next_accuracy:5.1%}"]),
            *self._pace(),
        ]
        return "  ".join([*parts, *left(self.speed.seconds_left)])

    def panel(self, width: int) -> Group:
        """Three lines, for terminals of 80 columns and more."""
        phase = f"phase {self.phase} of {self.phases}  " if self.phases > 1 else ""
        losses = f"loss {self.loss:.4f}   masked {self.masked_loss:.4f} ({self.masked_accuracy:.1%} right)"
        if self.next_loss is not None:
            losses += f"   next {self.next_loss:.4f} ({self.next_accuracy:.1%} right)"
        pace = "  ".join([*self._pace(), f"{self.speed.peak_memory_bytes / 1e9:.1f} GB"])
        head = progress(f"{phase}step", self.step, self.total_steps, self.speed.seconds_left, width)
        return Group(head, cropped(f"  {losses}"), cropped(f"  {pace}"))

    def _pace(self) -> list[str]:
        """Learning rate, speed and what else there is to tell of how the training goes."""
        return [
            f"rate {self.learning_rate:.2e}",
            *([] if self.gradient_norm is None else [f"norm {self.gradient_norm:.2f}"]),
            *([] if self.loss_scale is None else [f"scale {self.loss_scale:g}"]),
            f"{number(self.speed.pieces_per_second)} pieces/s",
            *([] if self.speed.flops_utilisation is None else [f"use {self.speed.flops_utilisation:.0%}"]),
            f"wait {self.speed.waiting_for_data:.0%}",
        ]


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """What the model scores on examples held out from training."""

    kind: ClassVar[str] = "evaluation"
    group: ClassVar[str] = "validation"
    no_curve: ClassVar[frozenset[str]] = frozenset({"step", "phase", "scored_examples", "evaluation_seconds"})
    phase: int
    """The phase of the run, counted from 1."""
    masked_loss: float
    """Masked-language-model loss of a predicted position, in nats."""
    masked_accuracy: float
    """Share of the predicted positions where the model's first choice is the piece that stood there."""
    scored_examples: int
    """Examples that were scored, over all ranks."""
    evaluation_seconds: float
    """What the evaluation took."""
    next_loss: float | None = None
    """Next-sentence loss of a sequence, in nats; None where the model does not predict that."""
    next_accuracy: float | None = None
    """Share of the sequences of which the model says rightly whether B follows A."""

    @property
    def perplexity(self) -> float:
        """Among how many pieces the model hesitates at a masked position, on average."""
        return math.exp(min(self.masked_loss, 700.0))

    def figures(self) -> dict[str, float | None]:
        return there({**vars(self), "perplexity": self.perplexity})

    def line(self) -> str:
        line = (
            f"validation {self.step}: masked {self.masked_loss:.4f} {self.masked_accuracy:.1%}"
            f"  perplexity {self.perplexity:.2f}"
        )
        return line if self.next_loss is None else f"{line}  next {self.next_loss:.4f} {self.next_accuracy:.1%}"
