"""Records of fine-tuning: the figures of a logged step, and the scores of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from finetuning.results import Figures, SplitScores, format_percent
from pretraining.reporting.console import format_number, format_seconds_left
from pretraining.reporting.meter import Speed
from pretraining.reporting.records import format_steps
from pretraining.reporting.run_log import LogRecord


@dataclass(frozen=True)
class TuningStep(LogRecord):
    """The figures of a logged step, over all steps since the one logged before."""

    kind: ClassVar[str] = "step"
    group: ClassVar[str] = "train"
    no_curve: ClassVar[frozenset[str]] = frozenset({"step", "seconds_left"})
    is_frequent: ClassVar[bool] = True
    epoch: float
    """Epochs that are done, with the part of the one at work."""
    loss: float
    """The minimised loss: the mean over labels, plus a share of the `language_loss` if it is trained."""
    learning_rate: float
    gradient_norm: float | None
    """Norm of the whole gradient before clipping."""
    items_per_second: float
    """Items of the task over all ranks."""
    speed: Speed
    total_steps: int = 0
    """Steps of the whole run. Not written."""
    language_loss: float | None = None
    """Mean loss of a piece by the language head, written too; None if it is not trained."""

    def figures(self) -> dict[str, float | None]:
        figures = {name: value for name, value in vars(self).items() if name not in UNWRITTEN}
        speed = {name: value for name, value in vars(self.speed).items() if name != "padded_pieces_per_second"}
        own = {} if self.language_loss is None else {"language_loss": self.language_loss}
        return {**figures, **own, **speed}

    def line(self) -> str:
        language = "" if self.language_loss is None else f"  language {self.language_loss:.4f}"
        norm = "" if self.gradient_norm is None else f"  norm {self.gradient_norm:.2f}"
        losses = f"epoch {self.epoch:.2f}  loss {self.loss:.4f}{language}"
        pace = f"lr {self.learning_rate:.2e}{norm}  {format_number(self.items_per_second)} items/s"
        steps, left = format_steps(self.step, self.total_steps), format_seconds_left(self.speed.seconds_left)
        return "  ".join([steps, losses, pace, *left])


@dataclass(frozen=True)
class ScoreRecord(LogRecord):
    """The scores of an evaluation."""

    kind: ClassVar[str] = "scores"
    epoch: float
    """Epochs that are done, with the part of the one at work."""
    scores: dict[str, Figures]
    """The figures of every split."""
    metric: str = ""
    """The figure by which runs are compared, shown in the line. Not written."""

    def figures(self) -> dict[str, float | None]:
        return {"step": self.step, "epoch": self.epoch, **self.curves()}

    def curves(self) -> dict[str, float | None]:
        """Returns every figure by split and name: `dev/accuracy`, `test/accuracy`."""
        return {f"{split}/{name}": value for split, table in self.scores.items() for name, value in table.items()}

    def line(self) -> str:
        scored = SplitScores(scores=self.scores)
        return f"after step {self.step:,}  epoch {self.epoch:.2f}  {describe(scored, self.metric)}"


def describe(scored: SplitScores, metric: str) -> str:
    """Formats the metric of every split, with its standard error and number of items where these are known."""
    shown = [metric]
    for split, figures in scored.scores.items():
        on = f" on {scored.items[split]:,}" if split in scored.items else ""
        shown.append(f"{split} {format_percent(figures[metric], scored.get_spread(split, metric))}{on}")
    return "  ".join(shown)


UNWRITTEN = ("speed", "total_steps", "language_loss")
"""Fields of a step that are not written under these names."""
