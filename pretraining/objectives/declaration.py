"""What an objective tells of itself. Every other file of this folder is one, and whoever asks for one finds it here.

An objective is what a model learns by before it has a task: which pieces it predicts, what else it is asked, and what
is told of that. Such a file has an `OBJECTIVE`, which derives from `Objective`; its name is what recipes call it
(`objective.name = "mlm"`). Its data and its heads are, in short, what `ltr.py` has:

    class LeftToRight(Objective):
        sees = "before"                      # a piece sees itself and those before it
        logits_at_once = 1024                # of nearly every piece of a batch they would take much memory

        def predictions(self, length, masked, done):
            return length - 1                # for memory, micro-batches that are "auto", and hours

        def batch(self, rows, draw=None):
            text = rows.restore_text()           # what the masks hide is put back
            chosen = np.delete(np.arange(len(text)), rows.starts + rows.lengths - 1)
            return pack(rows, text, chosen, text[chosen + 1])

        def heads(self, shape):
            return {"masked_head": "language head"}

        def build(self, shape):
            return {"masked_head": PieceHead(shape, self.logits_at_once)}

Loss, figures, operations and the class of its export follow: `mlm.py` has all of them, and the file ends with
`OBJECTIVE = LeftToRight()`. `make recipes-page` then writes its name into docs/recipes.md. A head that a class of
transformers has too bears the name that `huggingface/weights.py` has for it, such as `masked_head` for what predicts
pieces, so that it can be exported. Settings of its own are a class that derives from `ObjectiveSettings`, as in
`mlm.py`; methods find what the recipe says in `self.settings`, and the defaults where nobody has a recipe. Nothing here
loads PyTorch: heads are modules of `model/`, which methods import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from data_prep.common.declared import declared_in, foreign_values, joined_settings
from data_prep.common.errors import UserError
from data_prep.common.sections import NamedSection
from pretraining.model.shape import OBJECTIVE, Sees, Shape

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data_prep.shards import Manifest
    from pretraining.model.batch import PretrainingBatch, PretrainingBatches
    from pretraining.model.bert import Bert
    from pretraining.model.rows import Draw, Rows

COUNTS = ("predictions", "sequences")
"""What the sums over a batch are divided by: the pieces that are predicted, and the sequences."""


@dataclass(frozen=True)
class Figure:
    """A number that an objective tells of training or of validation, and what it is for people."""

    name: str
    """in metrics.jsonl and TensorBoard"""
    title: str
    unit: str
    meaning: str
    curve: str | None = None
    """what the chart of losses calls it; None for what is no part of the loss"""

    def format_value(self, value: float) -> str:
        """A value with its unit."""
        return f"{100 * value:.1f}%" if self.unit == "%" else f"{value:.4g} {self.unit}"


MINIMAL_PAIRS = Figure(
    "pairs_accuracy", "minimal pairs", "%", "pairs of sentences of which the good one is likelier; by chance 50%"
)
"""What any model that predicts pieces can be asked, beside the figures of its objective."""


class ObjectiveSettings(NamedSection):
    """What the model learns by, from the same shards."""

    name: str = OBJECTIVE
    """The objective."""


class Objective(ABC):
    """All that an objective must declare. `shape.pairs` says whether the data has what pairs are needed for."""

    settings_type: ClassVar[type[ObjectiveSettings]] = ObjectiveSettings
    """the settings of all objectives, and its own"""
    sees: ClassVar[Sees] = "both"
    """which pieces a piece sees besides itself, in pre-training and in all that follows"""
    logits_at_once: ClassVar[int | None] = None
    """how many predictions have their logits at the same time; None where all of a micro-batch have"""
    learns: ClassVar[str]
    """what its model does, as messages say it: a model that …"""
    pairs_head: ClassVar[str] = "what learns from pairs"
    """display name of the heads that only pairs train"""
    figures: ClassVar[tuple[Figure, ...]]
    """all numbers that it tells of training and of validation"""
    sum_of_pieces: ClassVar[str | None] = None
    """which of its sums is the cross-entropy of the predicted pieces, in nats; None where it predicts none"""
    tag: ClassVar[str]
    """the task that the hub offers such a model for"""
    loads_as: ClassVar[str]
    """the class of transformers that users load its predictions with"""

    def __init__(self, settings: ObjectiveSettings | None = None) -> None:
        """Takes the settings of a recipe; those of `OBJECTIVE` itself are the defaults."""
        self.settings = settings or self.settings_type()

    def used_settings(self, shape: Shape) -> list[str]:  # noqa: ARG002
        """The names of the settings that decided about a model of this shape, for its card."""
        return list(self.settings_type.model_fields)

    def faults(self, timed: bool) -> Iterator[str]:  # noqa: ARG002
        """Whatever its settings cannot be, each with its cure; `timed` where the clock decides how long a run is."""
        yield from ()

    def data_faults(self, manifest: Manifest) -> Iterator[str]:
        """What it needs and this data has not, each with its cure."""
        if self.pairs == "needed" and not manifest.has_pairs:
            cure = "make the data with shard.py --pairs nsp"
            yield f'objective.name = "{self.settings.name}": needs pairs, which the data has not; {cure}'

    # Its data.

    @property
    def pairs(self) -> Literal["needed", "used", "unused"]:
        """Whether it learns from pairs of segments: always, where the data has them, or never."""
        return "unused"

    @abstractmethod
    def predictions(self, length: Any, masked: Any, done: float) -> Any:
        """How many pieces a sequence of this length with so many masks predicts: of numbers, or of arrays of them.

        `done` is the share of a run's steps that lies behind; from 0 to 1 the count only grows or only falls.
        """

    @abstractmethod
    def batch(self, rows: Rows, draw: Draw | None = None) -> PretrainingBatch:
        """Makes a batch of examples as they stand in the shards; in training, `draw` is what may be drawn for them."""

    # Its heads.

    @abstractmethod
    def heads(self, shape: Shape) -> dict[str, str]:
        """The names of the modules that it adds to an encoder, in their order, with their display names."""

    @abstractmethod
    def build(self, shape: Shape) -> dict[str, nn.Module]:
        """Makes the heads, by their names."""

    @abstractmethod
    def parameters(self, shape: Shape) -> int:
        """Counts the parameters of the heads, without those that pad the vocabulary."""

    @abstractmethod
    def flops(self, shape: Shape, sequences: int, predictions: float) -> float:
        """Useful operations of the heads, forward: matrix products alone."""

    def needed_pieces(self, model: Bert, batch: PretrainingBatch) -> Tensor:  # noqa: ARG002
        """(k,) int64: the pieces whose last hidden states the heads see, each once; first those at which pieces are
        predicted."""
        return batch.chosen

    def num_needed(self, shape: Shape, sequences: int, predictions: float) -> float:  # noqa: ARG002
        """How many these are."""
        return predictions

    @abstractmethod
    def losses(self, model: Bert, seen: Tensor, batch: PretrainingBatch) -> Any:
        """A named tuple of sums over a batch, of losses and of what figures need, from the states that are `asked`."""

    @abstractmethod
    def sums(self, shape: Shape) -> tuple[str, ...]:
        """The names of what `losses` returns."""

    @abstractmethod
    def loss(self, losses: Any, batches: PretrainingBatches) -> Tensor:
        """This micro-batch's part of the loss of the global batch: exact for any ranks and micro-batches."""

    # What is told.

    @abstractmethod
    def measure(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Computes its figures from the totals of `sums` and of `COUNTS`."""

    @abstractmethod
    def total(self, figures: Mapping[str, float]) -> float:
        """The loss that is minimised, from its figures."""

    def score(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The figures of a validation, which may be more than those of training."""
        return dict(figures)

    @abstractmethod
    def describe_figures(self, figures: Mapping[str, float], width: int = 0) -> list[str]:
        """The figures in words of the console; shares take `width` columns at least."""

    def note(self, shape: Shape) -> str | None:  # noqa: ARG002
        """What a run prints about it when it begins."""
        return None

    # Its export.

    @abstractmethod
    def architecture(self, shape: Shape) -> str:
        """The class of transformers that has the same heads."""

    def exported_heads(self, shape: Shape) -> Sequence[str]:
        """The heads that this class has too; the others are left out of an export."""
        return list(self.heads(shape))

    @abstractmethod
    def logits(self, model: Bert, seen: Tensor, batch: PretrainingBatch) -> dict[str, Tensor]:
        """The logits of the exported heads, by display names, from the states that are `asked`."""

    @abstractmethod
    def pick_their_logits(self, output: Any, chosen: Tensor) -> dict[str, Tensor]:
        """The same logits from what transformers gives for one sequence, of which the chosen pieces are predicted."""

    @abstractmethod
    def describe_heads(self, shape: Shape) -> str:
        """Its heads, as the model card and messages have them: an encoder with its …"""

    def auto_class(self, shape: Shape) -> str:  # noqa: ARG002
        """The class of transformers by which the model card loads all that was exported."""
        return self.loads_as

    def loading_remark(self, shape: Shape) -> str | None:  # noqa: ARG002
        """What the model card says of loading by other classes."""
        return None


@lru_cache
def objectives() -> dict[str, Objective]:
    """All objectives, by the names that recipes have for them."""
    return declared_in(__file__, __package__, "OBJECTIVE")


def find_objective(shape: Shape) -> Objective:
    """The objective whose heads a model of this shape has, with settings of its own where there is no recipe."""
    return _find_by_name(shape.objective)


def configure_objective(settings: ObjectiveSettings) -> Objective:
    """The objective of a recipe, as it is set there: whoever asks about data asks this one."""
    return type(_find_by_name(settings.name))(settings)


def _find_by_name(name: str) -> Objective:
    if name not in objectives():
        there = ", ".join(objectives())
        raise UserError(
            f'objective.name = "{name}": there is {there}; put back pretraining/objectives/{name}.py, which it was'
        )
    return objectives()[name]


def all_settings(module: str) -> type[ObjectiveSettings]:
    """A table with the settings of all objectives, as a class `Objective` of this module."""
    meaning = "The objective: " + ", or ".join(f"`{name}` {kind.learns}" for name, kind in objectives().items()) + "."
    return joined_settings("Objective", ObjectiveSettings, _settings_of_all(), OBJECTIVE, meaning, module)


def _settings_of_all() -> dict[str, type[ObjectiveSettings]]:
    return {name: kind.settings_type for name, kind in objectives().items()}


def find_faults(settings: ObjectiveSettings, timed: bool) -> Iterator[str]:
    """Lists what the settings of an objective cannot be, and what is for another one."""
    yield from foreign_values("objective", settings, ObjectiveSettings, _settings_of_all())
    yield from configure_objective(settings).faults(timed)


def all_heads() -> dict[str, str]:
    """The heads of all objectives, whose names their weights begin with, and their display names."""
    any_shape = Shape(1, 1, 1, 1, 1)
    return {name: called for kind in objectives().values() for name, called in kind.heads(any_shape).items()}


def build_model(shape: Shape, recompute: bool = False) -> Bert:
    """Makes a model with the heads of its objective; `recompute` is that of `Encoder`."""
    from pretraining.model.bert import Bert

    return Bert(shape, find_objective(shape), recompute)


def num_parameters(shape: Shape) -> int:
    """The parameters of a model with its heads, without those that pad the vocabulary."""
    return shape.encoder_parameters + find_objective(shape).parameters(shape)


def step_flops(shape: Shape, lengths: Sequence[int], predictions: float) -> float:
    """Useful operations of a training step (forward and backward) on sequences of these real lengths.

    Matrix products alone, a multiplication and an addition each, as everyone counts them: linear layers, attention over
    real pieces, and the heads on the positions that are predicted.
    """
    return 3.0 * (shape.encoder_flops(lengths) + find_objective(shape).flops(shape, len(lengths), predictions))


def computed_flops(shape: Shape, lengths: Sequence[int], predictions: float) -> float:
    """Those of `step_flops` that are computed: behind its attention, of the last layer what the heads see alone."""
    h = shape.hidden
    unseen = sum(lengths) - find_objective(shape).num_needed(shape, len(lengths), predictions)
    return step_flops(shape, lengths, predictions) - 3.0 * 2 * (h * h + 2 * h * shape.intermediate) * unseen


def loss_curves() -> dict[str, str]:
    """The figures that are parts of a loss, and what charts call them."""
    every = [figure for objective in objectives().values() for figure in objective.figures]
    return {figure.name: figure.curve for figure in every if figure.curve is not None}


class TrainingReport(TypedDict):
    """What a record of training tells of an objective, by the names of its fields."""

    loss: float
    learns: dict[str, float]
    said: list[str]


def report_figures(objective: Objective, totals: Mapping[str, float], width: int = 0) -> TrainingReport:
    """What an objective tells of these totals; shares take `width` columns at least on the console."""
    figures = objective.measure(totals)
    return {"loss": objective.total(figures), "learns": figures, "said": objective.describe_figures(figures, width)}
