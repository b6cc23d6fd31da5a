"""The settings of a fine-tuning recipe: their meanings and limits.

Sections on precision, parallelism, logging and checkpoints are those of pre-training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from data_prep.common.reading import Form, read_settings
from data_prep.common.sections import Count, Fraction, InsteadOf, May, Positive, Removed, Section
from pretraining.config.conflicts import find_computing_faults
from pretraining.config.schedule import Schedule
from pretraining.config.settings import Checkpoints, Computing, Logging, PositiveOrAuto

Rate = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Varies:
    """Fact about a setting: the runs of a task differ in it."""

    label: str


class DropoutShares(Section):
    """Dropout; by default as in the model's config."""

    hidden: Fraction | None = None
    """Share of the activations dropped after the embeddings, in each layer and before the head."""
    attention: Fraction | None = None
    """Share of the attention probabilities dropped."""


class Search(Section):
    """The runs of a task: one for each combination and seed. The best on dev is kept."""

    learning_rates: Annotated[tuple[Rate, ...], Field(strict=False)] = ()
    """Learning rates to try (default: `learning_rate` alone)."""
    batches: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Batches to try (default: `batch` alone)."""
    epochs: Annotated[tuple[Rate, ...], Field(strict=False)] = ()
    """Epochs to try (default: `epochs` alone)."""
    seeds: Positive = 1
    """Restarts of each run, with another order of the data and another head."""
    jobs: PositiveOrAuto = "auto"
    """Runs side by side, in processes of their own: one for each GPU, or for each CPU core; 1: one after another."""


class Spans(Section):
    """Questions whose answers are spans of a text, as in SQuAD."""

    removed: ClassVar = {"best": Removed(20, "nobody reads more answers of a question")}
    stride: Positive = 128
    """Pieces from one window of a long text to the next."""
    question: Positive = 64
    """Pieces of a question at most; the rest is cut off."""
    answer: Positive = 30
    """Pieces of an answer at most."""


class Tags(Section):
    """A tag for each word, as in named-entity recognition."""

    document_context: bool = False
    """Fill the sequence with neighbouring sentences of the same document, which are not scored twice."""


class EmbeddingSettings(Section):
    """Vectors of texts, trained by texts that belong together."""

    pooling: Literal["mean", "cls", "last"] | None = None
    """Pieces whose hidden states make the vector of a text: the mean of all, [CLS], or the last (default: as the
    model's folder says, or the mean)."""
    temperature: Rate = 0.05
    """Cosines are divided by it before they are compared: 1 / the scale of sentence-transformers."""
    symmetric: bool = False
    """Also classify each passage's question; the loss is the mean of both directions."""
    widths: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """Matryoshka dimensions: also train the first N values of a vector to work alone, e.g. [384, 128]."""


LayerChoice = Literal[
    "",
    "embeddings",
    "last",
    "second-to-last",
    "sum-all",
    "weighted-last-four",
    "weighted-all",
    "concat-last-four",
    "mix",
]


class Features(Section):
    """Frozen activations instead of fine-tuning: a BiLSTM on layers of the encoder."""

    removed: ClassVar = {"cache_gb": Removed(4, "activations that take more are computed again in each epoch")}
    layers: LayerChoice = ""
    """Which layers; mix: as weighted-all, but with the embeddings, as in ELMo; empty: fine-tune the whole model."""
    hidden: Positive = 768
    """Width of the BiLSTM, half of it for each direction."""
    depth: Positive = 2
    """Layers of the BiLSTM."""


class BiLstm(Section):
    """A BiLSTM between the encoder and the head, which is trained with them."""

    hidden: Count = 0
    """Width, half of it for each direction; 0: none."""
    depth: Positive = 2
    """Layers."""


class GlueSettings(Section):
    """The tasks of GLUE."""

    wnli_majority: bool = False
    """Answer WNLI with the most frequent class, as the paper did, without training."""


class FineTuning(Computing):
    """The settings of fine-tuning a model for a task."""

    removed: ClassVar = {"decay": Removed("linear", "all papers of the recipes have it")}
    seed: Annotated[int, Field(ge=0, lt=2**63), Varies("seeds")] = 1
    """Seed of the new head, the order of the data and dropout; restarts count up from it."""
    epochs: Annotated[Rate, InsteadOf(("search.epochs",)), Varies("epochs")] = 3.0
    """Passes over the training items."""
    batch: Annotated[Positive, InsteadOf(("search.batches",)), Varies("batch")] = 32
    """Items per step, over all ranks."""
    micro_batch: Annotated[Positive | None, May.CHANGE_BETWEEN_STARTS] = None
    """Items that a rank computes at a time (default: its whole share)."""
    learning_rate: Annotated[Rate, InsteadOf(("search.learning_rates",)), Varies("learning rates")] = 3e-5
    """Highest learning rate."""
    warmup: Fraction = 0.1
    """Share of the steps in which the learning rate grows to its maximum; then it falls to 0."""
    language_loss: Annotated[float, Field(ge=0)] = 0.0
    """GPT's λ: weight of the language head's loss on the same texts, added to the task's loss. Needs a model of the
    objective ltr; 0: none."""
    length: Annotated[int, Field(ge=8, lt=2**31)] = 128
    """Longest sequence, in pieces."""
    evaluations: Positive = 1
    """Evaluations of dev in an epoch; there is always one at the end."""
    patience: Count = 0
    """Stop after this number of evaluations without a better score, and keep the best weights; 0: train to the end."""
    no_baseline: Annotated[bool, May.CHANGE_BETWEEN_STARTS] = False
    """Leave out the score of a cheaper method."""
    dropout: DropoutShares = DropoutShares()
    """Dropout."""
    search: Annotated[Search, May.CHANGE_BETWEEN_STARTS] = Search()
    """The runs of a task."""
    glue: GlueSettings = GlueSettings()
    """The tasks of GLUE."""
    spans: Spans = Spans()
    """Questions whose answers are spans of a text."""
    tags: Tags = Tags()
    """A tag for each word."""
    embeddings: EmbeddingSettings = EmbeddingSettings()
    """Vectors of texts."""
    features: Features = Features()
    """Frozen activations instead of fine-tuning."""
    bilstm: BiLstm = BiLstm()
    """A BiLSTM on top of the encoder."""
    logging: Annotated[Logging, May.CHANGE_BETWEEN_STARTS] = Logging()
    """Logging."""
    checkpoints: Annotated[Checkpoints, May.CHANGE_BETWEEN_STARTS] = Checkpoints(keep=1)
    """Saving of the state, so that a stopped run can continue."""

    def schedule(self, steps: int) -> Schedule:
        """Returns the learning rate schedule of a run of `steps` steps."""
        return Schedule(self.learning_rate, steps, round(self.warmup * steps))


FORM = Form(FineTuning, Path(__file__).parent / "recipes")
"""Fine-tuning recipes, and the folder of those in the package."""


def load_settings(
    recipe: str | Path, overrides: Sequence[str] = (), *, device: Literal["cpu", "cuda"] | None = None
) -> FineTuning:
    """Reads a recipe, a file or one of ours by name, and `--section.key value` flags.

    All faults of both are reported at once. A given `device` is checked against the recipe.
    """
    return read_settings(FORM, Path(recipe), overrides, find_faults=lambda settings: find_faults(settings, device))


def find_faults(settings: FineTuning, device: Literal["cpu", "cuda"] | None = None) -> list[str]:
    """Lists conflicting settings, with their cures."""
    faults = find_computing_faults(settings, device)
    if settings.parallel.same_bits:
        faults.append("parallel.same_bits = true: is for pre-training; leave it out")
    if settings.parallel.tensor > 1:
        faults.append(f"parallel.tensor = {settings.parallel.tensor}: is for pre-training; take 1")
    for name, width in (("features.hidden", settings.features.hidden), ("bilstm.hidden", settings.bilstm.hidden)):
        if width % 2:
            faults.append(f"{name} = {width}: one half is for each direction; take an even number, as {width + 1}")
    if settings.features.layers and settings.language_loss:
        faults.append("language_loss: frozen encoders do not learn; leave it out, or features.layers")
    if settings.features.layers and settings.bilstm.hidden:
        faults.append("bilstm.hidden: frozen features have a BiLSTM already; give its width as features.hidden")
    return faults
