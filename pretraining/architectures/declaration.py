"""The declaration of an architecture. Every other file of this folder is an architecture, and `find_architecture` finds
it; `weights.py` has what they declare weights with.

An architecture defines an encoder: its sizes and settings, its weights and their roles, what it costs, its modules, and
its form in transformers. A file has an `ARCHITECTURE`, whose class derives from `Architecture`; the file's name is the
name in recipes (`model.architecture = "bert"`) and checkpoints. Sizes of its own are a dataclass that derives from
`Shape`, with settings of the same names in a class that derives from `ModelSettings`. A layer is a module that is
called as `Layer` in `model/bert.py` is. Nothing here loads PyTorch: modules are those of `model/`, which `build`
and its like import.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from data_prep.common import sections
from data_prep.common.sections import Fraction, May, Positive, Section
from data_prep.common.toml_text import show_value
from pretraining.architectures.weights import TaskHead, Weight, count_parameters, count_products, declare_linear
from pretraining.model.shape import ARCHITECTURE, HEAD, OF_OBJECTIVE, PIECE_HEAD, Learning, Sees, Shape

if TYPE_CHECKING:
    from torch import nn

    from data_prep.vocabulary.vocabulary import Special
    from pretraining.answering.serving import ServedEncoder, ServeLayers
    from pretraining.model.encoder import Embeddings, Encoder

KEY = "architecture"
TASKS = ("SequenceClassification", "MultipleChoice", "QuestionAnswering", "TokenClassification")
"""The models with the head of a task, as transformers names them."""
USUAL_NAMES: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}
"""The names in config.json that most architectures have for numbers of their shape."""


def name_classes(prefix: str, *models: str, tasks: Iterable[str] = TASKS) -> dict[str, str]:
    """Names the classes of transformers for these models of an architecture, by the AutoModel class that finds them."""
    with_heads = {f"AutoModelFor{model}": f"{prefix}For{model}" for model in (*models, *tasks)}
    return {"AutoModel": f"{prefix}Model", **with_heads}


class ModelSettings(Section):
    """The encoder: a published size, or numbers. A number replaces that of the size."""

    architecture: str = ARCHITECTURE
    """The architecture."""
    size: str | None = None
    """One of the published sizes."""
    layers: Positive | None = None
    """Layers of the encoder."""
    hidden: Positive | None = None
    """Width of the encoder."""
    heads: Positive | None = None
    """Attention heads (default: hidden / 64)."""
    intermediate: Positive | None = None
    """Width of the feed-forward layers (default: 4 x hidden)."""
    positions: Positive = 512
    """Positions that have an embedding: the longest sequence."""
    dropout: Annotated[Fraction, May.DIFFER_FROM_BASE] = 0.1
    """Share of the activations dropped after the embeddings and in each layer."""
    attention_dropout: Annotated[Fraction, May.DIFFER_FROM_BASE] = 0.1
    """Share of the attention probabilities dropped."""
    segments: Positive = 2
    """Kinds of segments that have an embedding: 2 for the pairs of next-sentence prediction."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-12
    """Added to the variance in layer norms."""

    @model_validator(mode="before")
    @classmethod
    def fill_defaults(cls, given: Any) -> Any:
        """Adds the defaults of the architecture where they differ from those of the others."""
        if not isinstance(given, dict):
            return given
        kinds = [kind for name, kind in architectures().items() if name == given.get(KEY, ARCHITECTURE)]
        return {**kinds[0].defaults, **given} if kinds else given

    def shape(self, vocabulary: int, learns: Learning | None = None) -> Shape:
        """Computes the sizes for a vocabulary; `learns`: by default, by the default objective."""
        kind = find_architecture(self.architecture)
        names = {field.name for field in fields(kind.shape_type)}
        sizes = {**kind.find_sizes(self.size, self.hidden), **self.model_dump(include=names, exclude_none=True)}
        return kind.shape_type(vocabulary=vocabulary, learns=learns or Learning(), **sizes)


class LayerMemory(NamedTuple):
    """The numbers that are kept for each piece until the backward pass."""

    embeddings: float
    """of the embeddings"""
    before: float
    """of a layer, up to the end of attention: all pieces have these, in the last layer too"""
    chosen: float
    """copies that the last layer makes of each piece that the heads read, of its input and of attention's result"""
    behind: float
    """of a layer, after attention"""
    masks: float
    """bytes of the dropout masks of a layer, after attention, where PyTorch's operations keep them"""
    divided: tuple[float, float] = (0.0, 0.0)
    """of `before` and of `behind`, those that ranks which share the model divide"""


class Architecture(ABC):
    """The declaration of an architecture."""

    title: ClassVar[str]
    """its name in sentences"""
    shape_type: ClassVar[type[Shape]] = Shape
    """the sizes of all architectures, and its own"""
    settings_type: ClassVar[type[ModelSettings]] = ModelSettings
    """the settings of all architectures, and its own"""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """settings whose default is another than that of `ModelSettings`"""
    sizes: ClassVar[Mapping[str, tuple[int, int]]]
    """layers and width of its published sizes"""
    vocabulary: ClassVar[int] = 30522
    """pieces of its published vocabulary, which are assumed without data"""
    sees: ClassVar[tuple[Sees, ...]] = ("both", "before", "after")
    """the directions of attention that it can have"""

    # Its form in transformers; an architecture without one is exported with names of its own.

    model_type: ClassVar[str | None] = None
    """`model_type` in config.json; None if transformers does not have it"""
    classes: ClassVar[Mapping[str, str]] = {}
    """its classes in transformers, by the AutoModel class that finds them"""
    class_prefix: ClassVar[str] = ""
    """prefix of the names of these classes"""
    config_names: ClassVar[Mapping[str, str]] = {}
    """the names in config.json of the numbers of its shape that have another name there"""
    embedding_dropout: ClassVar[str] = ""
    """the name in config.json of the dropout of embeddings, if the layers' dropout has another name"""
    config_defaults: ClassVar[Mapping[str, Any]] = {}
    """the numbers that transformers leaves out of config.json, where they are other ones than those of `Shape`"""
    config_marks: ClassVar[tuple[str, ...]] = ()
    """the names in config.json of the ids of special pieces, besides that which pads"""
    config_constants: ClassVar[Mapping[str, Any]] = {}
    """values that config.json must have, if it has any there, and that an export writes: the activation"""
    config_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """values that config.json may have and an export leaves out; the first is what its absence means"""
    pooling_name: ClassVar[str] = ""
    """the entry of config.json that says whether the head of a task reads [CLS] ("cls") or the mean of all pieces
    ("mean"), if there is one; fine-tuning takes the mean"""
    trunk: ClassVar[str] = ""
    """prefix of the names of the encoder's weights in models with heads"""
    head_prefixes: ClassVar[tuple[str, ...]] = ()
    """prefixes of the names of the weights of heads, those of tasks included"""
    buffers: ClassVar[tuple[str, ...]] = ("position_ids",)
    """suffixes of the names of buffers, which older folders store beside weights; reading skips them"""
    untrained: ClassVar[tuple[str, ...]] = ()
    """prefixes of the names of weights that no pre-training trains; reading a pre-trained folder skips them"""
    old_ends: ClassVar[Mapping[str, str]] = {}
    """suffixes of the names of weights in old folders, and today's"""
    copies: ClassVar[Mapping[str, str]] = {}
    """names under which a weight may be stored a second time, and its own name"""

    def find_sizes(self, size: str | None, hidden: int | None) -> dict[str, int]:
        """Finds the sizes of a published model, with the widths that usually go with another `hidden`."""
        layers, width = self.sizes[size] if size else (0, 0)
        hidden = hidden or width
        return {"layers": layers, "hidden": hidden, "heads": max(1, hidden // 64), "intermediate": 4 * hidden}

    # Its weights.

    @abstractmethod
    def embeddings(self, shape: Shape) -> list[Weight]:
        """Declares the weights of the embeddings, in the order of the module's parameters."""

    @abstractmethod
    def layer(self, shape: Shape, number: int) -> list[Weight]:
        """Declares the weights of a layer, counted from 0. All but the first and the last are alike."""

    def weights(self, shape: Shape) -> list[Weight]:
        """Lists the weights of the encoder."""
        layers = (self.layer(shape, number) for number in range(shape.layers))
        return [*self.embeddings(shape), *itertools.chain.from_iterable(layers)]

    @abstractmethod
    def heads(self, shape: Shape) -> dict[str, list[Weight]]:
        """Declares the weights of the heads of pre-training that it has: `PIECE_HEAD`, and perhaps `pooler` and
        `next_head`."""

    def task_head(self, shape: Shape, head: TaskHead) -> list[Weight]:
        """Declares the weights of the head of a task: its linear layer, named `head`, behind the pooler if it has
        one."""
        theirs = "qa_outputs" if head.kind == "spans" else "classifier"
        pooler = self.heads(shape)["pooler"] if head.has_pooler else []
        return [*pooler, *declare_linear("head", [theirs], head.outputs, shape.hidden, HEAD)]

    # Its costs.

    def count_products(self, shape: Shape) -> tuple[float, float]:
        """Counts the operations of the matrix products of a layer for each piece, up to attention and after it; by
        default with two matrices of the feed-forward block."""
        h = shape.hidden
        return 2 * 3 * h * h, 2 * (h * h + 2 * h * shape.intermediate)

    def count_seen(self, shape: Shape, length: float) -> float:
        """Counts the pairs of a piece and a piece that it sees, in a sequence of this length, as a mean of the
        layers."""
        share, every = shape.one_way_share, length * length
        return share * length * (length + 1) / 2 + (1 - share) * every if share else every

    @abstractmethod
    def layer_memory(self, shape: Shape) -> LayerMemory:
        """Counts the numbers that are kept until the backward pass."""

    # Its modules.

    @abstractmethod
    def build(self, shape: Shape) -> tuple[Embeddings, list[nn.Module]]:
        """Makes the embeddings and the layers, the last one able to compute only chosen pieces."""

    @abstractmethod
    def build_head(self, name: str, shape: Shape, at_once: int | None = None) -> nn.Module:
        """Makes a head of `heads`; of `PIECE_HEAD`, `at_once` is the most predictions whose logits are in memory
        together."""

    def find_server(self) -> ServeLayers | None:
        """Returns the function of `answering/` that makes faster layers for inference, also in 8 bits. With None, the
        layers of training answer, and 8 bits are refused."""
        return None

    def is_theirs(self, shape: Shape, pooled: bool) -> bool:
        """Whether a class of transformers computes the same model; `pooled`: whether it has a pooler, which reads the
        first piece there."""
        return bool(self.classes) and (shape.learns.sees == "both" or (shape.learns.sees == "before" and not pooled))

    def config(self, shape: Shape) -> dict[str, Any]:
        """Makes the part of config.json that says what is computed."""
        names = self.config_names if self.model_type else self.list_config_names()
        sizes = {theirs: getattr(shape, ours) for ours, theirs in names.items()}
        apart = {self.embedding_dropout: shape.dropout} if self.embedding_dropout else {}
        usual = {**self.config_constants, "initializer_range": shape.initializer_range}
        return {**usual, **sizes, **apart}

    def adapt_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns config.json with the numbers as `Shape` has them, if they differ there."""
        return config

    def fit_vocabulary(self, shape: Shape, special: Special) -> Shape:  # noqa: ARG002
        """Returns the shape for an export with a vocabulary that has these special pieces."""
        return shape

    def find_padding(self, shape: Shape) -> int | None:  # noqa: ARG002
        """Returns the piece that transformers takes for padding wherever it is, if it does."""
        return None

    def faults(self, shape: Shape) -> Iterator[str]:  # noqa: ARG002
        """Yields what cannot be in sizes, each with its cure."""
        yield from ()

    def learns_pairs(self, shape: Shape) -> bool:
        """Whether it has a head that only pairs of segments train."""
        return "next_head" in self.heads(shape)

    def list_config_names(self) -> dict[str, str]:
        """Lists the numbers of a shape with their names in config.json."""
        names = (field.name for field in fields(self.shape_type) if field.name not in (KEY, "learns"))
        return {name: self.config_names.get(name, name) for name in names}


@lru_cache
def architectures() -> dict[str, Architecture]:
    """Finds all architectures, by their names in recipes."""
    return sections.declared_in(__file__, __package__, "ARCHITECTURE")


def find_architecture(name: str) -> Architecture:
    """Finds an architecture by its name in recipes and checkpoints."""
    return sections.find_declared(architectures(), name, "model.architecture", "pretraining/architectures")


def make_shape(size: str, vocabulary: int, architecture: str = ARCHITECTURE) -> Shape:
    """Makes the shape of a published size, with the default objective."""
    return find_architecture(architecture).settings_type(architecture=architecture, size=size).shape(vocabulary)


def read_shape(values: Mapping[str, Any]) -> Shape:
    """Makes a shape of stored values, as `Shape.values` returns them."""
    names = {field.name for field in fields(Learning)}
    own = {name: value for name, value in values.items() if name.startswith(OF_OBJECTIVE)}
    settings = tuple(sorted((name.removeprefix(OF_OBJECTIVE), value) for name, value in own.items()))
    learns = Learning(**{name: value for name, value in values.items() if name in names}, settings=settings)
    sizes = {name: value for name, value in values.items() if name not in {*names, *own}}
    return find_architecture(values.get(KEY, ARCHITECTURE)).shape_type(**sizes, learns=learns)


def join_all_settings(module: str) -> type[ModelSettings]:
    """Makes a class `Model` of this module with the settings of all architectures."""
    meaning = "; ".join(f"`{name}`: {kind.title}" for name, kind in architectures().items()) + "."
    size: Any = (Literal[tuple(list_sizes())] | None, Field(None, description="One of the published sizes."))
    kinds = _settings_of_all()
    return sections.joined_settings("Model", ModelSettings, kinds, ARCHITECTURE, meaning, module, KEY, size=size)


def _settings_of_all() -> dict[str, type[ModelSettings]]:
    return {name: kind.settings_type for name, kind in architectures().items()}


def find_faults(settings: ModelSettings) -> Iterator[str]:
    """Yields the faults of the settings of an encoder."""
    yield from sections.foreign_values("model", settings, ModelSettings, _settings_of_all(), KEY)
    kind, size = find_architecture(settings.architecture), settings.size
    if size is not None and size not in kind.sizes:
        yield f"model.size = {show_value(size)}: none of {kind.title}'s: {', '.join(kind.sizes)}"
        return
    yield from kind.faults(settings.shape(vocabulary=1))


@lru_cache
def count_encoder_parameters(shape: Shape) -> int:
    """Counts the parameters of an encoder without heads and without the padding of the vocabulary."""
    kind = find_architecture(shape.architecture)
    ends = [count_parameters(kind.layer(shape, number)) for number in sorted({0, shape.layers - 1})]
    between = count_parameters(kind.layer(shape, 1)) if shape.layers > 2 else 0
    return count_parameters(kind.embeddings(shape)) + sum(ends) + (shape.layers - 2) * between


def count_encoder_flops(shape: Shape, lengths: Iterable[float]) -> float:
    """Counts the useful operations of the layers, forward: matrix products, and attention over the pieces that are
    seen."""
    kind, lengths = find_architecture(shape.architecture), list(lengths)
    seen = sum(kind.count_seen(shape, length) for length in lengths)
    return shape.layers * (sum(kind.count_products(shape)) * sum(lengths) + 4 * shape.hidden * seen)


def count_head_products(shape: Shape) -> int:
    """Counts the operations of the head that predicts pieces for one of them, its decoder included."""
    weights = find_architecture(shape.architecture).heads(shape)[PIECE_HEAD]
    return count_products(weights) + 2 * shape.hidden * shape.vocabulary


def build_encoder(shape: Shape) -> Encoder:
    """Makes an encoder without heads."""
    from pretraining.model.encoder import Encoder

    return Encoder(shape, find_architecture(shape.architecture))


def serve_encoder(encoder: Encoder, sees_one: bool, in_bytes: bool = False) -> ServedEncoder:
    """Makes an encoder for inference, as `ServedEncoder` says."""
    from pretraining.answering.serving import ServedEncoder

    return ServedEncoder(encoder, find_architecture(encoder.shape.architecture).find_server(), sees_one, in_bytes)


def list_sizes() -> list[str]:
    """Lists the names of the published sizes of all architectures, the smallest first."""
    every = sorted((numbers, name) for kind in architectures().values() for name, numbers in kind.sizes.items())
    return list(dict.fromkeys(name for _, name in every))
