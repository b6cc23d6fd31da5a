"""What pre-training tells of itself: the figures of a logged step, and the scores of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Group, RenderableType

from pretraining.reporting.console import Waiting, cropped, left, number, progress
from pretraining.reporting.meter import Speed
from pretraining.reporting.run_log import Record

COUNTS = ("predictions", "sequences")
"""What the sums of a batch are divided by: the masked pieces, and the sequences."""
NEXT_SENTENCE = ("next_loss", "next_accuracy", "next_larger_class")
"""The figures that a model without next-sentence prediction does not have."""


def mean_losses(totals: Mapping[str, float]) -> dict[str, float]:
    """Losses and accuracies, from the totals of what the model adds up and of `COUNTS`."""
    predictions, sequences = (max(totals[name], 1) for name in COUNTS)
    losses = {
        "masked_loss": totals["masked"] / predictions,
        "masked_accuracy": totals["masked_correct"] / predictions,
    }
    if "next_sentence" not in totals:
        return losses
    losses["next_loss"] = totals["next_sentence"] / sequences
    losses["next_accuracy"] = totals["next_sentence_correct"] / sequences
    random = totals["random_next"]
    losses["next_larger_class"] = max(random, sequences - random) / sequences
    return losses


def next_sentence(figures: StepRecord | EvaluationRecord) -> list[str]:
    """The figures of next-sentence prediction, as the console has them; none where the model does not predict that."""
    if figures.next_loss is None:
        return []
    larger = figures.next_larger_class
    return [f"next {figures.next_loss:.4f} {figures.next_accuracy:.1%} (larger class {larger:.1%})"]


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
    next_larger_class: float | None = None
    """Share of these sequences that one answer alone gets right: whichever of both is more frequent among them."""
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
        """At most 165 columns for the numbers that runs have."""
        parts = [
            steps_done(self.step, self.total_steps),
            f"loss {self.loss:.4f}",
            f"masked {self.masked_loss:.4f} {self.masked_accuracy:5.1%}",
            *next_sentence(self),
            *self._pace(),
        ]
        return "  ".join([*parts, *left(self.speed.seconds_left)])

    def panel(self, width: int) -> Group:
        """Three lines, for terminals of 80 columns and more."""
        head = step_bar(self.step, self.total_steps, self.phase, self.phases, self.speed.seconds_left, width)
        return Group(head, *self.details())

    def details(self) -> list[RenderableType]:
        """The lines of the panel that say how well and how fast it goes."""
        masked = f"masked {self.masked_loss:.4f} {self.masked_accuracy:.1%}"
        losses = "  ".join([f"loss {self.loss:.4f}", masked, *next_sentence(self)])
        pace = "  ".join([*self._pace(), f"{self.speed.peak_memory_bytes / 1e9:.1f} GB"])
        return [cropped(f"  {losses}"), cropped(f"  {pace}")]

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
class Progress:
    """How far a run is between two records, as far as its host knows that without asking the GPU."""

    doing: str
    """What goes on now."""
    step: int
    """Optimizer steps that the run has done."""
    total_steps: int
    """Steps of the whole run; 0 where the clock decides."""
    phase: int
    """The phase of the run, counted from 1."""
    phases: int
    """Phases of the whole run."""
    next_record: int
    """The step of the next record, which has losses."""
    pieces_per_second: float | None
    """Real pieces of all ranks since the last record, an estimate; None where no step was done since."""
    seconds_left: float | None
    """How long the rest of the run will take, an estimate; None where that is not known."""
    latest: StepRecord | None
    """The last record of steps; None before the first."""

    @property
    def has_news(self) -> bool:
        """Whether it tells more than the last record."""
        return self.pieces_per_second is not None

    def line(self) -> str:
        done, follow = steps_done(self.step, self.total_steps), f"losses follow at step {self.next_record:,}"
        return "  ".join([done, *self._pace(), *left(self.seconds_left), follow])

    def panel(self, width: int) -> Group:
        """Three lines, or four once there are losses, the last of which says for how long that goes on which does."""
        head = step_bar(self.step, self.total_steps, self.phase, self.phases, self.seconds_left, width)
        first = cropped("  " + "  ".join([*self._pace(), f"losses follow at step {self.next_record:,}"]))
        return Group(head, *([first] if self.latest is None else self.latest.details()), Waiting(f"  {self.doing}"))

    def _pace(self) -> list[str]:
        return [] if self.pieces_per_second is None else [f"{number(self.pieces_per_second)} pieces/s"]


def steps_done(step: int, total: int) -> str:
    """How many of its steps a run has done, as wide as it will ever be."""
    return f"{step:>{len(str(total))}}/{total}" if total else f"{step:>6}"


def step_bar(step: int, total: int, phase: int, phases: int, seconds_left: float | None, width: int) -> RenderableType:
    """How many of its steps a run has done, in which of its phases."""
    return progress(f"phase {phase} of {phases}  step" if phases > 1 else "step", step, total, seconds_left, width)


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
    next_larger_class: float | None = None
    """Share of these sequences that one answer alone gets right: whichever of both is more frequent among them."""

    @property
    def perplexity(self) -> float:
        """Among how many pieces the model hesitates at a masked position, on average."""
        return math.exp(min(self.masked_loss, 700.0))

    def figures(self) -> dict[str, float | None]:
        return there({**vars(self), "perplexity": self.perplexity})

    def line(self) -> str:
        masked = f"masked {self.masked_loss:.4f} {self.masked_accuracy:.1%}"
        return "  ".join(
            [f"validation {self.step}: {masked}", f"perplexity {self.perplexity:.2f}", *next_sentence(self)]
        )
