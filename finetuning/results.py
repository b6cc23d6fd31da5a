"""Files that the commands of fine-tuning leave in folders: their names, and the content of those in JSON.

OUT/plan.json                  the runs that the last command was to make, by task
OUT/results.json               all tasks, and the averages of GLUE where it has all tasks of them
OUT/sst2/
  results.json                 all runs, the best, mean, median and spread
  model/                       the best model: a folder of transformers
  predictions/                 what it says of dev and test
  lr5e-05-seed1/               one run
    begun.json                 what it depends on: settings, model and data
    results.json               its scores, once it is done; before that there are its checkpoints
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json

BEGUN, RESULTS, MODEL, PREDICTIONS = "begun.json", "results.json", "model", "predictions"
PLAN = "plan.json"
AVERAGES = "averages"
"""The key of OUT/results.json that is no task."""
Figures = dict[str, float]
"""Figures of a split by their names, as fractions: accuracy 0.93, f1 0.91."""
ClassFigures = dict[str, int | float | None]
"""Recall and precision of a class with their spreads, and how many items it has."""
AnyRecord = TypeVar("AnyRecord", bound="JsonRecord")


class JsonRecord(BaseModel):
    """The content of a JSON file. What was not set is not in the file."""

    model_config = ConfigDict(frozen=True, strict=True)

    @classmethod
    def read(cls: type[AnyRecord], path: Path) -> AnyRecord | None:
        """Reads a file; None where there is none."""
        try:
            return cls.model_validate(read_json(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise UserError(f"{path}: damaged: {error}\nremove it, and run again") from error

    def as_dict(self) -> dict[str, Any]:
        """The content as JSON has it."""
        return self.model_dump(exclude_unset=True)

    def write(self, path: Path) -> None:
        write_json(path, self.as_dict())


class Begun(JsonRecord):
    """The settings, model and data that the outcome of a run depends on."""

    settings: dict[str, Any] = {}
    """Settings that change the outcome by more than rounding."""
    model: dict[str, Any] = {}
    """A checksum of the model to begin with."""
    data: dict[str, str] = {}
    """How many rows every split has, and a checksum of them."""
    batches: str = ""
    """The rule by which batches are drawn; empty where nothing is trained, and in runs of before there was a name."""
    threads: list[int] = []
    """The threads of every rank, which decide how sums are rounded."""

    def drop_threads(self) -> dict[str, Any]:
        """The content that another start of the run must have too."""
        return self.model_dump(exclude={"threads"})


class SplitScores(JsonRecord):
    """The scores of a model on every split that has labels, and how sure they are."""

    scores: dict[str, Figures] = {}
    """The split by which runs are compared is the first."""
    items: dict[str, int] = {}
    spreads: dict[str, Figures] = {}
    """The standard errors of the scores."""
    classes: dict[str, dict[str, ClassFigures]] = {}

    def get_spread(self, split: str, figure: str) -> float | None:
        """The standard error of a figure of a split; None where it is not known."""
        return self.spreads.get(split, {}).get(figure)


class ModelScores(SplitScores):
    """The scores of the model of one run."""

    degenerate: bool = False
    """Whether it says the same of every item."""


class RunResult(ModelScores):
    """The result of a run."""

    run: str = ""
    metric: str = ""
    """The figure by which runs are compared."""
    score: FiniteFloat | None = None
    """This figure on the first split; None where the run has failed."""
    settings: dict[str, Any] = {}
    predicted: list[str] = []
    """The splits that the model was asked about."""
    failed: str | None = None
    """Why the run has no score."""
    steps: int | None = None
    seconds: float | None = None
    items_per_second: float | None = None
    dtype: str | None = None
    ranks: int | None = None
    device: str | None = None


class TaskResult(SplitScores):
    """The results of the runs of a task, with the scores of the best."""

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
    """How many rows every split has, and a checksum of them."""
    unanswered: list[str] = []
    """Splits that came after the best run."""
    degenerate: list[str] = []
    """The runs whose models say the same of every item."""
    failed: list[str] = []
    runs: dict[str, RunResult]


class GroupScore(JsonRecord):
    """How many minimal pairs of a group a model gets right."""

    accuracy: FiniteFloat
    spread: FiniteFloat
    """The standard error of the accuracy."""
    right: int
    pairs: int


class PairsResult(GroupScore):
    """How a model scores on minimal pairs, without having learned any task."""

    model: str
    checksum: str
    """That of the model, with its heads."""
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
    """What this start took to score the pairs that were left."""
    scored_now: int
    """The pairs that were left."""
    utilisation: FiniteFloat | None
    """Useful operations a second of this, as a share of what products of matrices reach here in fp32."""
    dtype: str
    device: str
    threads: int
    torch: str


def name_predictions_file(folder: Path, split: str, ending: str) -> Path:
    """The file of this folder with the answers to a split."""
    return folder / f"predictions_{split}{ending}"
