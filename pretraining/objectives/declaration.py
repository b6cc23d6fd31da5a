"""The declaration of an objective. Each file of this folder with an `OBJECTIVE` is one, which `find_objective` finds.

An objective defines pre-training: which pieces a model predicts, its heads, its losses and their figures (this file),
what it costs (`costs.py`) and what it exports (`exports.py`). The file's name is the name in recipes (`objective.name =
"mlm"`). This is all that has to be written, with the imports of `ltr.py`:

    class Sums(NamedTuple):
        nats: Tensor
        correct: Tensor

    class LeftToRight(Objective):
        learns = "predicts the next piece"
        sees = "before"                      # a piece sees itself and those before it
        figures = (Figure("piece_loss", "piece loss", "nats", "cross-entropy of a piece", "loss of pieces"),)
        tag, loads_as = "text-generation", "AutoModelForCausalLM"

        def predictions(self, length, masked, done):
            return length - 1                # for memory, automatic micro-batches and hours

        def batch(self, rows, draw=None):
            text = rows.restore_text()       # the pieces that masks hide are restored
            chosen = np.delete(np.arange(len(text)), rows.starts + rows.lengths - 1)
            return pack(rows, text, chosen, text[chosen + 1])

        def heads(self, shape):
            return {"masked_head": "language head"}    # which every architecture has

        def losses(self, model, seen, batch):
            return Sums(*model.head("masked_head")(seen, model.embeddings.word.weight, batch.labels))

        def sums(self, shape):
            return Sums._fields

        def loss(self, losses, batches):
            return losses.nats / max(batches.predictions, 1)

        def measure(self, totals):
            return {"piece_loss": totals["nats"] / max(totals["predictions"], 1)}

        def describe_figures(self, figures, width=0):
            return [f"pieces {figures['piece_loss']:.4f}"]

        def logits(self, model, seen, batch):
            return {"language": model.head("masked_head").logits(seen, model.embeddings.word.weight)}

        def pick_their_logits(self, output, chosen):
            return {"language": output.logits[0, chosen]}

        def describe_heads(self, shape):
            return "language head, which predicts every piece from those before it"

    OBJECTIVE = LeftToRight()

`make recipes-page` then writes its name into docs/recipes.md. A head that is exported must be one that the architecture
declares, as `masked_head`, which predicts pieces; `build` makes other heads too. A subclass of another objective
declares its own `learns` and `describe_heads`, and does not inherit `tag`, `reading` and `loading_remark`. Settings of
its own are a class that derives from `ObjectiveSettings`, as in `mlm.py`; methods read them from `self.settings`, which
has the defaults where there is no recipe. Nothing here loads PyTorch: heads are modules of `model/`, which methods
import.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from data_prep.common.errors import UserError
from data_prep.common.sections import NamedSection, declared_in, find_declared, foreign_values, joined_settings
from pretraining.architectures.declaration import count_encoder_flops, count_encoder_parameters, find_architecture
from pretraining.model.shape import OBJECTIVE, SIDES, Learning, Sees, Shape
from pretraining.objectives.costs import ObjectiveCosts
from pretraining.objectives.exports import ObjectiveExports

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data_prep.common.arrays import Array
    from data_prep.shards import Manifest
    from pretraining.model.batch import PretrainingBatch, PretrainingBatches
    from pretraining.model.encoder import PretrainingModel
    from pretraining.model.rows import Draw, Rows

COUNTS = ("predictions", "sequences")
"""The counts that sums over a batch are divided by: predicted pieces, and sequences."""


@dataclass(frozen=True)
class Figure:
    """A number of training or validation, with its description."""

    name: str
    """the name in metrics.jsonl and TensorBoard"""
    title: str
    unit: str
    meaning: str
    curve: str | None = None
    """its name in the chart of losses; None if it is no part of the loss"""

    def format_value(self, value: float) -> str:
        """Formats a value with its unit."""
        return f"{100 * value:.1f}%" if self.unit == "%" else f"{value:.4g} {self.unit}"


MINIMAL_PAIRS = Figure(
    "pairs_accuracy", "minimal pairs", "%", "pairs of sentences of which the good one is likelier; by chance 50%"
)
"""The figure of all models that predict pieces, beside those of their objective."""
RETRIEVAL = Figure("retrieval_ndcg_10", "retrieval", "%", "nDCG@10 of passages found by the mean of hidden states")
"""The figure of all models, beside those of their objective."""


class ObjectiveSettings(NamedSection):
    """What the model learns by, from the same shards."""

    name: str = OBJECTIVE
    """The objective."""


class Objective(ObjectiveCosts, ObjectiveExports):
    """The declaration of an objective. `shape.learns.pairs` says whether the model learns from pairs of segments."""

    settings_type: ClassVar[type[ObjectiveSettings]] = ObjectiveSettings
    """the settings of all objectives, and its own"""
    model_settings: ClassVar[tuple[str, ...]] = ()
    """the settings that decide about its heads or the weights of losses; they belong to a model, as its sizes do"""
    sees: ClassVar[Sees] = "both"
    """which pieces a piece sees besides itself, in pre-training and in all that follows"""
    logits_at_once: ClassVar[int | None] = None
    """the most predictions whose logits are in memory together; None for all of a micro-batch"""
    pairs_head: ClassVar[str] = "what learns from pairs"
    """display name of the heads that only pairs train"""
    figures: ClassVar[tuple[Figure, ...]]
    """its figures of training and validation"""
    needs_masks: ClassVar[bool] = False
    """whether the vocabulary must have a piece that stands for masks alone"""
    sum_of_pieces: str | None = None
    """the name of the sum that is the cross-entropy of the predicted pieces, in nats; None where it predicts none"""
    shift: ClassVar[int] = 0
    """how many places before a masked piece its prediction is read"""
    can_be_shared: ClassVar[bool] = True
    """whether ranks can share its model, whose heads then declare their cuts"""

    def __init__(self, settings: ObjectiveSettings | None = None) -> None:
        """Takes the settings of a recipe, by default the defaults."""
        self.settings = settings or self.settings_type()

    def used_settings(self, shape: Shape) -> list[str]:  # noqa: ARG002
        """Lists the settings that had an effect on a model of this shape, for its card."""
        return list(self.settings_type.model_fields)

    def faults(self, timed: bool) -> Iterator[str]:  # noqa: ARG002
        """Yields the faults of its settings, each with its cure; `timed`: the length of a run is in hours."""
        yield from ()

    def data_faults(self, manifest: Manifest) -> Iterator[str]:  # noqa: ARG002
        """Yields what this data lacks, each with its cure."""
        yield from ()

    def list_ways(self, learns: Learning) -> dict[Sees, Learning]:
        """Lists the directions of attention that its model has learned, each with what `Shape.learns` is then."""
        return {learns.sees: learns}

    # Its data.

    def learning(self, has_pairs: bool) -> Learning:
        """Returns what a model learns by from data that has pairs or not."""
        settings = tuple(sorted((name, getattr(self.settings, name)) for name in self.model_settings))
        return Learning(self.settings.name, has_pairs and self.uses_pairs, self.sees, settings)

    @property
    def uses_pairs(self) -> bool:
        """Whether it learns from pairs of segments where the data has them."""
        return False

    def draw_one_way(self, keys: Array) -> Array | None:  # noqa: ARG002
        """Draws by their keys which examples see only what is before, (s,) bool; None where all see alike."""
        return None

    def count_predictions(self, lengths: Array, masked: Array, done: float, one_way: Array | None) -> Any:  # noqa: ARG002
        """Counts the predicted pieces of examples in training, (s,); `one_way` is what `draw_one_way` drew."""
        return self.predictions(lengths, masked, done)

    @abstractmethod
    def batch(self, rows: Rows, draw: Draw | None = None) -> PretrainingBatch:
        """Makes a batch of examples. In training `draw` has random keys; examples drawn to see one way are first."""

    def validation_batch(self, rows: Rows) -> PretrainingBatch:
        """Makes a batch for validation, which may have examples more than once."""
        return self.batch(rows)

    # Its heads.

    def build(self, shape: Shape) -> dict[str, nn.Module]:
        """Makes the heads, by their names: by default those that the architecture declares."""
        build = find_architecture(shape.architecture).build_head
        return {name: build(name, shape, self.logits_at_once) for name in self._declared_heads(shape)}

    def needed_pieces(self, model: PretrainingModel, batch: PretrainingBatch) -> Tensor:  # noqa: ARG002
        """Returns the places of the pieces whose last states the heads need, (k,) int64; first those of predictions."""
        return batch.chosen

    def forward(self, model: PretrainingModel, batch: PretrainingBatch) -> Any:
        """Computes the sums over a batch for losses and figures, as a named tuple: by default `losses`, from one pass
        through the encoder. Another objective may call the encoder more often, or on pieces that it makes; its `passes`
        say so."""
        return self.losses(model, model.states_for_heads(batch), batch)

    @abstractmethod
    def losses(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> Any:
        """Computes the sums over a batch, as a named tuple, from the states of `needed_pieces`."""

    @abstractmethod
    def sums(self, shape: Shape) -> tuple[str, ...]:
        """Returns the names of the sums of `forward`."""

    @abstractmethod
    def loss(self, losses: Any, batches: PretrainingBatches) -> Tensor:
        """Computes this micro-batch's part of the loss of the global batch: exact for any ranks and micro-batches."""

    # Its figures.

    @abstractmethod
    def measure(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Computes its figures from the totals of `sums` and of `COUNTS`."""

    def total(self, figures: Mapping[str, float]) -> float:
        """Computes the loss that is minimised from the figures, by default the sum of its parts without weights."""
        return sum(figures.get(figure.name, 0.0) for figure in self.figures if figure.curve is not None)

    def score(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Completes the figures of a validation: by the perplexity, if it is declared, of the loss declared first."""
        declared = [figure.name for figure in self.figures]
        perplexity = {name: math.exp(min(figures[declared[0]], 700.0)) for name in declared if name == "perplexity"}
        return {**figures, **perplexity}

    @abstractmethod
    def describe_figures(self, figures: Mapping[str, float], width: int = 0) -> list[str]:
        """Formats the figures for the console; shares take at least `width` columns."""

    def list_notes(self, shape: Shape) -> list[str]:  # noqa: ARG002
        """Lists the notes that a run prints when it begins."""
        return []

    # Its export.

    def exported_heads(self, shape: Shape) -> Sequence[str]:
        """Lists the heads that a class of transformers has too; the others are left out of an export."""
        return list(self.heads(shape))


@lru_cache
def objectives() -> dict[str, Objective]:
    """Finds all objectives, by their names in recipes."""
    return declared_in(__file__, __package__, "OBJECTIVE")


def find_objective(shape: Shape) -> Objective:
    """Finds the objective of a shape, with the settings that a model has, and otherwise the defaults."""
    return _find_for_model(shape.learns.objective, shape.learns.settings)


@lru_cache
def _find_for_model(name: str, settings: tuple[tuple[str, Any], ...]) -> Objective:
    found = _find_by_name(name)
    return type(found)(found.settings_type(name=name, **dict(settings))) if settings else found


def configure_objective(settings: ObjectiveSettings) -> Objective:
    """Returns the objective of a recipe with its settings, which decide about data."""
    return type(_find_by_name(settings.name))(settings)


def _find_by_name(name: str) -> Objective:
    return find_declared(objectives(), name, "objective.name", "pretraining/objectives")


def join_all_settings(module: str) -> type[ObjectiveSettings]:
    """Makes a class `Objective` of this module with the settings of all objectives."""
    meaning = "; ".join(f"`{name}` {kind.learns}" for name, kind in objectives().items()) + "."
    return joined_settings("Objective", ObjectiveSettings, _settings_of_all(), OBJECTIVE, meaning, module)


def _settings_of_all() -> dict[str, type[ObjectiveSettings]]:
    return {name: kind.settings_type for name, kind in objectives().items()}


def find_faults(settings: ObjectiveSettings, timed: bool, used: Sequence[str] = ()) -> Iterator[str]:
    """Yields the faults of the settings of objectives, and the settings of those that are not used: `settings.name` is,
    and `used` are by some phases."""
    yield from foreign_values("objective", settings, ObjectiveSettings, _settings_of_all(), used=used)
    for name in dict.fromkeys([settings.name, *used]):
        yield from configure_objective(settings.model_copy(update={"name": name})).faults(timed)


def list_loss_curves() -> dict[str, str]:
    """Lists the figures that are parts of a loss, with their names in charts."""
    every = [figure for objective in objectives().values() for figure in objective.figures]
    return {figure.name: figure.curve for figure in every if figure.curve is not None}


def list_heads() -> dict[str, str]:
    """Lists the heads of all objectives with their display names; names of weights begin with the name of the head."""
    any_shape = Shape(1, 1, 1, 1, 1)
    return {name: called for kind in objectives().values() for name, called in kind.heads(any_shape).items()}


def choose_way(shape: Shape, sees: Sees | None, where: str) -> Shape:
    """Returns the shape with this direction of attention; None keeps that of the objective. Raises UserError if the
    model has not learned it."""
    if sees is None:
        return shape
    objective, kind = find_objective(shape), find_architecture(shape.architecture)
    ways = {way: learns for way, learns in objective.list_ways(shape.learns).items() if way in kind.sees}
    if sees not in ways:
        learned = " or ".join(SIDES[way] for way in ways)
        raise UserError(
            f"--sees {sees}: a {kind.title} of {where} {objective.learns}, and its pieces learned to see {learned}; "
            f"leave --sees out, or name a model of the objective hybrid with a causal_share between 0 and 1"
        )
    return replace(shape, learns=ways[sees])


def build_model(shape: Shape, recompute: bool = False) -> PretrainingModel:
    """Makes a model with the heads of its objective; `recompute` is that of `Encoder`."""
    from pretraining.model.encoder import PretrainingModel

    return PretrainingModel(shape, find_architecture(shape.architecture), find_objective(shape), recompute)


def num_parameters(shape: Shape) -> int:
    """Counts the parameters of a model with its heads, without those that pad the vocabulary."""
    return count_encoder_parameters(shape) + find_objective(shape).parameters(shape)


def count_step_flops(shape: Shape, lengths: Sequence[int], predictions: float) -> float:
    """Counts the useful operations of a training step (forward and backward) on sequences of these real lengths: as
    usual, the multiplications and additions of matrix products, those of linear layers, of attention over real pieces,
    and of the heads on the predicted positions."""
    objective = find_objective(shape)
    flops = objective.flops(shape, len(lengths), predictions)
    for each in objective.passes(shape, len(lengths), sum(lengths), predictions):
        flops += each.share * count_encoder_flops(each.shape, lengths) + each.flops
    return 3.0 * flops


def count_computed_flops(shape: Shape, lengths: Sequence[int], predictions: float) -> float:
    """Counts the operations of `count_step_flops` that are computed: after its attention, the last layer computes only
    the pieces that the heads need."""
    flops, pieces = count_step_flops(shape, lengths, predictions), sum(lengths)
    for each in find_objective(shape).passes(shape, len(lengths), pieces, predictions):
        _, behind = find_architecture(each.shape.architecture).count_products(each.shape)
        flops -= 3.0 * behind * (each.share * pieces - each.needed)
    return flops
