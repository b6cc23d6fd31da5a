"""The interface of a task: items to train on and to score, a head, and figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.common.arrays import Array
from finetuning.inputs import Cutter, Items, Ragged
from finetuning.results import Figures
from finetuning.scale import ScoreScale
from finetuning.settings import FineTuning
from finetuning.tasks import scores
from finetuning.tasks.scores import Certainty
from pretraining.architectures.weights import TaskHead


class PieceLengths(NamedTuple):
    """The lengths of a part of the items, in pieces, and the limit beyond which they are cut off."""

    what: str
    """`texts`, `questions`."""
    setting: str
    """The setting of the limit: `length`."""
    limit: int
    measure: Callable[[Array], Array]
    """Returns the pieces of the sequences of these items before they are cut."""


@dataclass(frozen=True)
class Seen:
    """The items of a split."""

    texts: tuple[Sequence[str], ...]
    """Columns of texts; a row of them is an item."""
    answers: Sequence[Hashable]
    """The right answer to every item, to find equal texts with other answers."""
    lengths: tuple[PieceLengths, ...] = ()
    """Of what may be cut off, rather than read in parts."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Items of each class, label or type of entity; empty where there are none."""

    def __len__(self) -> int:
        return len(self.texts[0])


Column = Sequence[str] | Array
"""Values of a split: texts or numbers."""


@dataclass(frozen=True)
class Setup:
    """Cutter, settings and head for making items of the files of a task."""

    cutter: Cutter
    settings: FineTuning
    trained: TaskHead | None = None
    """The head of a trained model that is only scored. Training files may then be missing: dev stands in for them, and
    the labels are the model's."""


class Task(ABC):
    """A task whose files have been read; faults in them raised UserError with file and line."""

    name: str
    """Its name in folders and tables: `sst2`, `squad1`."""
    head: TaskHead
    metric: str
    """The figure by which runs are compared, on the first split of `dev`; higher is better."""
    train: Items
    dev: Mapping[str, Items]
    """The scored splits by name: `dev`, or `dev_matched` and `dev_mismatched`."""
    test: Mapping[str, Items] = {}
    """Splits without labels, which are only predicted."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the files: skipped rows, answers that are not at their offset."""

    @property
    def scale(self) -> ScoreScale:
        """The scale of the scores; the default for other tasks changes nothing."""
        return ScoreScale()

    @abstractmethod
    def list_columns(self, split: str) -> list[Column]:
        """Lists the columns that were read of `train` or of another split, before anything is cut into pieces; the
        first has a value for every row."""

    @abstractmethod
    def describe_split(self, split: str) -> Seen:
        """Describes the items of a split of `train` or `dev`, for a look before training."""

    def answer_without_model(self) -> dict[str, Ragged] | None:
        """Makes the outputs of all splits if they are answered without a model, as the paper answered WNLI; None if a
        model is trained."""
        return None

    def answer_by_baseline(self) -> tuple[str, dict[str, Ragged]] | None:
        """Fits the cheapest usual method to the training items; returns its name and its outputs for all splits of
        `dev`, or None if the task has none. ImportError where a library of it is missing."""
        return None

    @abstractmethod
    def score(self, split: str, outputs: Ragged) -> Figures:
        """Scores a split of `dev`. `outputs` has the logits of its items in order: (1, labels) of each item, (1, 1) for
        a score, (1, choices) for a choice, (pieces, 2) for spans, (words, tags) for tags."""

    @abstractmethod
    def estimate_certainty(self, split: str, outputs: Ragged) -> Certainty:
        """Estimates the standard errors of the figures of a split of `dev`."""

    def is_degenerate(self, split: str, outputs: Ragged) -> bool:  # noqa: ARG002
        """Tells whether a model gives every item of a split of `dev` the same answer, as after a failed training."""
        return scores.is_degenerate(self.head, outputs)

    @abstractmethod
    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        """Writes the predictions for a split of `dev` or `test` into this folder."""

    @abstractmethod
    def describe_use(self, outputs: Ragged) -> dict[str, Any]:
        """Describes the use of the model for its task.json: length, fields, and a threshold found in the `outputs` of
        the first split of `dev`."""
