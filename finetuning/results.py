"""The files that fine-tuning writes: their names, and the content of those in JSON.

OUT/plan.json                  the runs of the last command, by task
OUT/results.json               all tasks, and the averages of GLUE where it has all tasks of them
OUT/sst2/
  results.json                 all runs, the best, mean, median and spread
  model/                       the best model: a folder of transformers
  predictions/                 its predictions for dev and test
  baseline.json                the scores of a cheaper method
  lr5e-05-seed1/               one run
    begun.json                 its settings, model and data
    results.json               its scores, once it is done; before that there are its checkpoints
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json

BEGUN, RESULTS, MODEL, PREDICTIONS = "begun.json", "results.json", "model", "predictions"
PLAN, BASELINE = "plan.json", "baseline.json"
AVERAGES = "averages"
"""The key of OUT/results.json that is not a task."""
Figures = dict[str, float]
"""Figures of a split by name, as fractions: accuracy 0.93, f1 0.91."""
ClassFigures = dict[str, int | float | None]
"""Recall and precision of a class with their standard errors, and its number of items."""
AnyRecord = TypeVar("AnyRecord", bound="JsonRecord")


class JsonRecord(BaseModel):
    """The content of a JSON file; unset fields are not written."""

    model_config = ConfigDict(frozen=True, strict=True)

    @classmethod
    def read(cls: type[AnyRecord], path: Path) -> AnyRecord | None:
        """Reads a file; None if there is none."""
        try:
            return cls.model_validate(read_json(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise UserError(f"{path}: damaged: {error}\nremove it, and run again") from error

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        return self.model_dump(exclude_unset=True)

    def write(self, path: Path) -> None:
        write_json(path, self.as_dict())


class Begun(JsonRecord):
    """The settings, model and data that determine the outcome of a run."""

    settings: dict[str, Any] = {}
    """Settings that change the outcome by more than rounding."""
    model: dict[str, Any] = {}
    """A checksum of the initial model."""
    data: dict[str, str] = {}
    """Row count and checksum of train and of every scored split, and the scale of scores; without training, of splits
    without labels too."""
    batches: str = ""
    """The name of the rule that draws batches; empty without training, and in older runs."""
    threads: list[int] = []
    """Threads of every rank; they determine how sums are rounded."""


class SplitScores(JsonRecord):
    """The scores of a model on every labelled split, with their standard errors."""

    scores: dict[str, Figures] = {}
    """Figures by split; runs are compared by the first."""
    items: dict[str, int] = {}
    spreads: dict[str, Figures] = {}
    """The standard errors of the scores."""
    classes: dict[str, dict[str, ClassFigures]] = {}

    def get_spread(self, split: str, figure: str) -> float | None:
        """Returns the standard error of a figure of a split; None if unknown."""
        return self.spreads.get(split, {}).get(figure)

    def get_figures(self) -> dict[str, Any]:
        """Returns the values of this class alone."""
        return {name: getattr(self, name) for name in SplitScores.model_fields}

    def format_score(self, split: str, figure: str) -> str:
        """Formats a figure of a split, in hundredths, with its standard error if that is known."""
        return format_percent(self.scores.get(split, {}).get(figure), self.get_spread(split, figure))


class Baseline(SplitScores):
    """The scores of a method without a neural network, fitted to the same training items."""

    how: str
    """The method."""
    data: dict[str, str]
    """As in the begun.json of the runs."""

    def get_score(self, metric: str) -> float:
        """Returns a figure of the first split; NaN if unknown."""
        return next(iter(self.scores.values())).get(metric, math.nan)

    def compare(self, result: TaskResult) -> str:
        """Says whether it is better than the best run by more than the standard errors of both."""
        more = self.get_score(result.metric) - (math.nan if result.score is None else result.score)
        chance = math.hypot(result.chance or 0.0, self.get_spread(result.first_split, result.metric) or 0.0)
        return ", within chance of the best run" if abs(more) <= chance else ", better than the best run" * (more > 0)


class ModelScores(SplitScores):
    """The scores of the model of one run."""

    degenerate: bool = False
    """Whether it gives every item the same answer."""


class RunResult(ModelScores):
    """The result of a run."""

    run: str = ""
    metric: str = ""
    """The figure by which runs are compared."""
    score: FiniteFloat | None = None
    """This figure on the first split; None if the run has failed."""
    settings: dict[str, Any] = {}
    predicted: list[str] = []
    """The splits with predictions."""
    asked: dict[str, str] = {}
    """Row count and checksum of those without labels."""
    failed: str | None = None
    """Why the run has no score."""
    steps: int | None = None
    seconds: float | None = None
    items_per_second: float | None = None
    dtype: str | None = None
    ranks: int | None = None
    device: str | None = None


class TaskResult(SplitScores):
    """The results of all runs of a task, with the scores of the best."""

    task: str = ""
    metric: str
    best: str | None = None
    """The name of the best run."""
    score: FiniteFloat | None = None
    mean: float | None = None
    median: float | None = None
    spread: list[float] | None = None
    """The lowest and the highest score."""
    data: dict[str, str] = {}
    """As in the begun.json of its runs."""
    unanswered: list[str] = []
    """Splits that were added or changed after the best run."""
    degenerate: list[str] = []
    """Runs whose models give every item the same answer."""
    failed: list[str] = []
    baseline: Baseline | None = None
    """The scores of a cheaper method, if the task has one."""
    runs: dict[str, RunResult]

    @property
    def first_split(self) -> str:
        """The split by which runs are compared."""
        return next(iter(self.scores), "")

    @property
    def chance(self) -> float | None:
        """The standard error of the score; None if unknown."""
        return self.get_spread(self.first_split, self.metric)


class GroupScore(JsonRecord):
    """The accuracy of a model on a group of minimal pairs."""

    accuracy: FiniteFloat
    spread: FiniteFloat
    """The standard error of the accuracy."""
    right: int
    pairs: int


class PairsResult(GroupScore):
    """The results of a pre-trained model on minimal pairs."""

    model: str
    checksum: str
    """Checksum of the model with its heads."""
    data: str
    """The file of the pairs."""
    data_sha256: str
    chance: FiniteFloat
    equal: int
    """Pairs of two equal sentences, which count as wrong."""
    too_long: int
    """Pairs with more pieces than the model has positions, which do not count."""
    without_pieces: int = 0
    """Other pairs with a sentence of which no piece is left, which do not count."""
    phenomena: dict[str, GroupScore]
    paradigms: dict[str, GroupScore]
    seconds: FiniteFloat
    """Seconds that this start spent on scoring."""
    scored_now: int
    """Pairs that this start scored."""
    dtype: str
    device: str
    threads: int
    torch: str


def name_predictions_file(folder: Path, split: str, ending: str) -> Path:
    """Returns the path of the predictions for a split in this folder."""
    return folder / f"predictions_{split}{ending}"


def format_percent(figure: float | None, spread: float | None = None) -> str:
    """Formats a score in hundredths, with its standard error if that is known."""
    if figure is None:
        return ""
    return f"{100 * figure:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")
