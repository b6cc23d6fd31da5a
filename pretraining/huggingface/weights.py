"""The names and sizes of weights in transformers and here, and the conversion between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import find_objective

Kind = Literal["classes", "labels", "score", "choice", "spans", "tags"]
"""One class of several, several labels at once, a number, one of several texts, a stretch of the text, a tag a word."""
KINDS: tuple[Kind, ...] = get_args(Kind)
ARCHITECTURES: dict[Kind, str] = {
    "classes": "BertForSequenceClassification",
    "labels": "BertForSequenceClassification",
    "score": "BertForSequenceClassification",
    "choice": "BertForMultipleChoice",
    "spans": "BertForQuestionAnswering",
    "tags": "BertForTokenClassification",
}
"""The classes of transformers with the same heads."""


@dataclass(frozen=True)
class TaskHead:
    """The head of a task: a linear layer on hidden states, with the names of its outputs."""

    kind: Kind
    labels: tuple[str, ...] = ()
    """Names of classes, labels or tags, in the order of the outputs; empty for other kinds."""

    @property
    def outputs(self) -> int:
        """Number of outputs for a sequence, for a text to choose, or for a piece."""
        return {"score": 1, "choice": 1, "spans": 2}.get(self.kind, len(self.labels))

    @property
    def has_pooler(self) -> bool:
        """Whether it reads [CLS] through BERT's pooler; otherwise it reads the pieces."""
        return self.kind not in ("spans", "tags")

    @property
    def architecture(self) -> str:
        """The class of transformers with the same head."""
        return ARCHITECTURES[self.kind]


HEADS = {"pooler": "bert.pooler.", "masked_head": "cls.predictions.", "next_head": "cls.seq_relationship."}
"""The heads of pre-training: prefixes of our names, and of those in transformers."""
TASK_HEADS = ("classifier.", "qa_outputs.")
"""Prefixes of the names of a task's head in transformers; ours is always `head`."""
Heads = Literal["pre-training", "none"] | TaskHead
"""The heads on an encoder: those of pre-training; none but a pooler, if there is one; or the head of a task."""
COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Weights that some versions store twice; both must be equal."""
OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
PADDED = ("embeddings.word.weight", "masked_head.bias")
"""Our weights with a row for every piece of the padded vocabulary."""
LISTED = 10
"""Number of faults that a message lists."""


@dataclass(frozen=True)
class Weight:
    """A weight of ours, and its counterparts in transformers."""

    ours: str
    theirs: tuple[str, ...]
    """Names in transformers; if several, our weight is their rows in order."""
    size: tuple[int, ...]
    """The size of our weight without padding."""

    @property
    def part(self) -> tuple[int, ...]:
        """The size of each weight of transformers."""
        return (self.size[0] // len(self.theirs), *self.size[1:])

    def pad_size(self, shape: Shape) -> tuple[int, ...]:
        """Computes the size of our weight in the model, with padding."""
        return (shape.padded_vocabulary if self.ours in PADDED else self.size[0], *self.size[1:])


def list_weights(shape: Shape, heads: Heads = "pre-training") -> list[Weight]:
    """Lists all weights of an encoder with its heads."""
    h = shape.hidden
    weights = [
        Weight("embeddings.word.weight", ("bert.embeddings.word_embeddings.weight",), (shape.vocabulary, h)),
        Weight("embeddings.position.weight", ("bert.embeddings.position_embeddings.weight",), (shape.positions, h)),
        Weight("embeddings.segment.weight", ("bert.embeddings.token_type_embeddings.weight",), (shape.segments, h)),
        *_list_affine("embeddings.norm", ["bert.embeddings.LayerNorm"], h),
    ]
    for layer in range(shape.layers):
        weights += _list_layer(f"layers.{layer}", f"bert.encoder.layer.{layer}", h, shape.intermediate)
    of_pretraining = _list_heads(shape)
    if heads == "none":
        return weights + of_pretraining["pooler"]
    if isinstance(heads, TaskHead):
        theirs = "qa_outputs" if heads.kind == "spans" else "classifier"
        return weights + of_pretraining["pooler"] * heads.has_pooler + _list_affine("head", [theirs], heads.outputs, h)
    for name in find_objective(shape).exported_heads(shape):
        weights += of_pretraining[name]
    return weights


def _list_heads(shape: Shape) -> dict[str, list[Weight]]:
    """Lists the weights of the heads of pre-training, by our names of the heads."""
    h, prediction = shape.hidden, "cls.predictions"
    return {
        "pooler": _list_affine("pooler", ["bert.pooler.dense"], h, h),
        "masked_head": [
            *_list_affine("masked_head.transform", [f"{prediction}.transform.dense"], h, h),
            *_list_affine("masked_head.norm", [f"{prediction}.transform.LayerNorm"], h),
            Weight("masked_head.bias", (f"{prediction}.bias",), (shape.vocabulary,)),
        ],
        "next_head": _list_affine("next_head", ["cls.seq_relationship"], 2, h),
    }


def has_pairs(names: Iterable[str]) -> bool:
    """Whether weights of these names include a head that only pairs train."""
    return any(name.removeprefix("bert.").startswith(("pooler.", "cls.seq_relationship.")) for name in names)


def _list_layer(ours: str, theirs: str, hidden: int, inner: int) -> list[Weight]:
    attention = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
    return [
        *_list_affine(f"{ours}.attention.qkv", attention, 3 * hidden, hidden),
        *_list_affine(f"{ours}.attention.output", [f"{theirs}.attention.output.dense"], hidden, hidden),
        *_list_affine(f"{ours}.attention.norm", [f"{theirs}.attention.output.LayerNorm"], hidden),
        *_list_affine(f"{ours}.feed_forward.inner", [f"{theirs}.intermediate.dense"], inner, hidden),
        *_list_affine(f"{ours}.feed_forward.output", [f"{theirs}.output.dense"], hidden, inner),
        *_list_affine(f"{ours}.feed_forward.norm", [f"{theirs}.output.LayerNorm"], hidden),
    ]


def count_segments(state: Mapping[str, Tensor]) -> int:
    """Counts the segments with embeddings of their own: 1 if all equal the first."""
    rows = state["embeddings.segment.weight"]
    return 1 if torch.equal(rows, rows[:1].expand_as(rows)) else len(rows)


def repeat_segment(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gives every segment the embedding of the first, since no other was trained."""
    rows = state["embeddings.segment.weight"]
    return {**state, "embeddings.segment.weight": rows[:1].expand_as(rows).clone()}


def _list_affine(ours: str, theirs: Sequence[str], rows: int, *columns: int) -> list[Weight]:
    """Lists the weight and the bias of a linear layer, or of a norm, which has no columns."""
    return [
        Weight(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), (rows, *columns)),
        Weight(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), (rows,)),
    ]


def export_weights(state: Mapping[str, Tensor], shape: Shape, heads: Heads = "pre-training") -> dict[str, Tensor]:
    """Converts our weights to those of transformers: new tensors, without padding and copies of the decoder."""
    weights = list_weights(shape, heads)
    assert state.keys() == {weight.ours for weight in weights}, "not the weights of a whole model of ours"
    theirs: dict[str, Tensor] = {}
    for weight in weights:
        ours = state[weight.ours]
        assert tuple(ours.shape) == weight.pad_size(shape), f"{weight.ours}: {tuple(ours.shape)}"
        parts = ours[: weight.size[0]].detach().cpu().chunk(len(weight.theirs))
        theirs.update((name, part.clone()) for name, part in zip(weight.theirs, parts, strict=True))
    return theirs


def import_weights(
    state: Mapping[str, Tensor], shape: Shape, where: str = "these weights", heads: Heads = "pre-training"
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Converts the weights of any BERT to ours, in fp32; returns also the names of ours that are missing.

    Only whole heads of pre-training may be missing; the caller initialises them. Other heads than `heads` are left out,
    unless `heads` are those of pre-training. Raises UserError for an unknown weight, a wrong size, a missing layer or
    half a head.
    """
    unasked = () if heads == "pre-training" else (*HEADS.values(), *TASK_HEADS)
    found = _rename_weights(state, where, unasked)
    weights, faults, ours = list_weights(shape, heads), [], {}
    places = {name: weight for weight in weights for name in weight.theirs}
    for name, (given, tensor) in found.items():
        size = tuple(tensor.shape)
        if name not in places:
            if not name.startswith(unasked):
                called = _name_heads(shape, heads)
                faults.append(f"{given} {size} has no place in a BERT of {shape.layers} layers with {called}")
        elif size != places[name].part:
            faults.append(f"{given} is {size}; by the config it should be {places[name].part}")
        elif not tensor.is_floating_point():
            faults.append(f"{given} holds {tensor.dtype}; only unquantised weights can be read")
    missing = [weight for weight in weights if not all(name in found for name in weight.theirs)]
    lost = [weight for weight in missing if isinstance(heads, TaskHead) or not _may_be_missing(weight, found)]
    faults += [f"{name} is missing" for weight in lost for name in weight.theirs if name not in found]
    refuse_faults(where, faults)
    check_finite(where, {given: tensor for name, (given, tensor) in found.items() if name in places})
    for weight in weights:
        if weight not in missing:
            rows = torch.cat([found[name][1] for name in weight.theirs])
            ours[weight.ours] = torch.zeros(weight.pad_size(shape))
            ours[weight.ours][: len(rows)] = rows
    return ours, tuple(weight.ours for weight in missing)


def _name_heads(shape: Shape, heads: Heads) -> str:
    """Names the heads for messages."""
    if heads == "pre-training":
        return find_objective(shape).describe_heads(shape)
    return f"the head of {heads.architecture}" if isinstance(heads, TaskHead) else "whatever head"


def _rename_weights(state: Mapping[str, Tensor], where: str, unasked: tuple[str, ...]) -> dict[str, tuple[str, Tensor]]:
    """Returns the weights by their current names in transformers, each with its given name for messages.

    Raises UserError for a decoder that is not tied to the word embeddings, unless its head is left out.
    """
    found: dict[str, tuple[str, Tensor]] = {}
    for given, tensor in state.items():
        if given.split(".")[-1] == "position_ids":
            continue  # a buffer of older versions: 0, 1, 2, …
        name = given if given.startswith(("bert.", "cls.", *TASK_HEADS)) else f"bert.{given}"
        for old, new in OLD_ENDS.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if name in found:
            raise UserError(f"{where}: {found[name][0]} and {given} are the same weight; one of them is too many")
        found[name] = (given, tensor)
    for copy, name in COPIES.items():
        if copy in found:
            given, tensor = found.pop(copy)
            other = found.setdefault(name, (given, tensor))[1]
            if not copy.startswith(unasked) and not torch.equal(other, tensor):
                raise UserError(
                    f"{where}: {given} {tuple(tensor.shape)} differs from {name} {tuple(other.shape)}: "
                    "a decoder of its own is not supported, only one tied to the word embeddings"
                )
    return found


def _may_be_missing(weight: Weight, found: Mapping[str, object]) -> bool:
    """Whether the weight belongs to a head of pre-training that is missing as a whole."""
    prefix = HEADS.get(weight.ours.partition(".")[0])
    return prefix is not None and not any(name.startswith(prefix) for name in found)


def check_finite(where: str, weights: Mapping[str, Tensor]) -> None:
    """Raises UserError with the names of weights that are not finite."""
    wrong = [name for name, weight in weights.items() if not weight.isfinite().all()]
    refuse_faults(where, [f"{name} has values that are no numbers" for name in wrong])


def refuse_faults(where: str, faults: list[str]) -> None:
    """Raises UserError with the first faults, if there are any."""
    if faults:
        more = [f"… and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        raise UserError("\n".join([f"{where}: {fault}" for fault in faults[:LISTED]] + more))
