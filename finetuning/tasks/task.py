"""The interface of a task: items to train on and to score, a head, and figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.common.arrays import Array
from finetuning.inputs import Cutter, Items
from finetuning.ragged import Ragged
from finetuning.results import Figures
from finetuning.scale import Scale
from finetuning.settings import FineTuning
from finetuning.tasks import scores
from finetuning.tasks.scores import Certainty
from pretraining.huggingface.weights import TaskHead


@dataclass(frozen=True)
class Lengths:
    """How long something of the items is, in pieces, and how much of it a model is given."""

    what: str
    """`texts`, `questions`."""
    setting: str
    """The setting that limits them: `length`."""
    limit: int
    measure: Callable[[Array], Array]
    """The pieces of the sequences of the items of these numbers, if nothing were cut off."""
    cuts: bool = True
    """Whether what is beyond the limit is lost, rather than read in parts."""


@dataclass(frozen=True)
class Seen:
    """The items of a split."""

    texts: tuple[Sequence[str], ...]
    """Columns of texts, whose rows together are what is asked of an item."""
    answers: Sequence[Hashable]
    """The right answer to every item, to find items of the same text with other answers."""
    lengths: tuple[Lengths, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    """How often every class, label or kind of entity is right; empty where there are none."""
    numbers: Array | None = None
    """The numbers that are right, where the task asks for some."""

    def __len__(self) -> int:
        return len(self.texts[0])


Column = Sequence[str] | Array
"""Values that were read of a split: texts or numbers."""


@dataclass(frozen=True)
class Setup:
    """Cutter, settings and head by which the files of a task become items."""

    cutter: Cutter
    settings: FineTuning
    trained: TaskHead | None = None
    """The head of a model that is trained already and only scored. Files to train on may then be missing: those of dev
    stand in for them, and the labels are the model's."""


@dataclass(frozen=True)
class Compared:
    """The right answers to the items of a split, or to their words, beside those of a model."""

    right: Array
    said: Array
    names: tuple[str, ...]
    """The names of the classes that `right` and `said` count; empty where the answers are numbers themselves."""


class Task(ABC):
    """A task whose files are read. What is wrong with them was a UserError with file and line before."""

    name: str
    """Its name in folders and tables: `sst2`, `squad1`."""
    head: TaskHead
    metric: str
    """The score by which runs are compared, on the first split of `dev`; more is better."""
    train: Items
    dev: Mapping[str, Items]
    """The splits that are scored, by name: `dev`, or `dev_matched` and `dev_mismatched`."""
    test: Mapping[str, Items] = {}
    """The splits that are only predicted, since nobody has their labels."""
    notes: tuple[str, ...] = ()
    """Lines for the user on what was read: rows that were skipped, answers that are not at their offset."""

    @property
    def scale(self) -> Scale:
        """The scale of the numbers to learn; it changes nothing for a task that asks for no numbers."""
        return Scale()

    @abstractmethod
    def list_columns(self, split: str) -> list[Column]:
        """What was read of a split of `train` or `dev`, whose items it decides: columns, the first with a value for
        every row. Nothing is cut into pieces for it."""

    @abstractmethod
    def describe_split(self, split: str) -> Seen:
        """The items of a split of `train` or `dev`, for a look at them before the training."""

    def answer_without_model(self, split: str) -> Ragged | None:  # noqa: ARG002
        """The outputs for a split of a task that is answered without training, as the paper did WNLI; None where a
        model is trained."""
        return None

    @abstractmethod
    def score(self, split: str, outputs: Ragged) -> Figures:
        """Scores a split of `dev`. `outputs` has the logits of its items, in their order: of an item one row of
        (1, labels), or of (1, 1) for a score, of (1, choices) for a choice; for spans a row of (pieces, 2), for tags
        one of (words, tags)."""

    @abstractmethod
    def estimate_certainty(self, split: str, outputs: Ragged) -> Certainty:
        """Says how sure the figures of a split of `dev` are, given how many items it has."""

    def is_degenerate(self, split: str, outputs: Ragged) -> bool:  # noqa: ARG002
        """Tells whether a model says the same of every item of a split of `dev`, as after a training that failed."""
        return scores.is_degenerate(self.head, outputs)

    @abstractmethod
    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        """Writes what the model says of a split of `dev` or `test` into files of this folder."""

    def read_compared(self, split: str, folder: Path) -> Compared | None:  # noqa: ARG002
        """Reads the predictions that were written for a split of `dev` again, for a chart; None for a task that has
        none."""
        return None

    @abstractmethod
    def describe_use(self, outputs: Ragged) -> dict[str, Any]:
        """What must be known to use the model on other text, for its task.json: the longest sequence, the fields of a
        pair, a threshold that was found in the `outputs` of the first split of `dev`."""
