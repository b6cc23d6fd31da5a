"""The names and sizes of weights and settings, in transformers and here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.model.shape import Shape

HEADS = {"pooler": "bert.pooler.", "masked_head": "cls.predictions.", "next_head": "cls.seq_relationship."}
"""Heads that weights may lack as a whole: how our names begin, and how those in transformers do."""
COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Weights that some versions store twice; both must be the same."""
OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}
"""Settings of a config with the values that our encoder computes; where a config does not say, it means the first."""
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "segments": "type_vocab_size",
}
"""Whole numbers of a config: our names, and those in transformers."""
RATES = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "epsilon": "layer_norm_eps",
}
"""Shares and other small numbers of a config: our names, and those in transformers."""
DEFAULTS = {field.name: field.default for field in fields(Shape) if field.default is not MISSING}
PADDED = ("embeddings.word.weight", "masked_head.bias")
"""Our weights that have a row for every piece of the padded vocabulary."""
LISTED = 10
"""How many faults a message lists."""


@dataclass(frozen=True)
class Weight:
    """A weight of ours, and the weights of transformers that hold the same."""

    ours: str
    theirs: tuple[str, ...]
    """Several names where ours has their rows one after another."""
    size: tuple[int, ...]
    """The size of ours without padding."""

    @property
    def part(self) -> tuple[int, ...]:
        """The size that every one of theirs has."""
        return (self.size[0] // len(self.theirs), *self.size[1:])

    def padded(self, shape: Shape) -> tuple[int, ...]:
        """The size of ours as the model holds it."""
        return (shape.padded_vocabulary if self.ours in PADDED else self.size[0], *self.size[1:])


def list_weights(shape: Shape) -> list[Weight]:
    """Lists every weight of an encoder with its heads."""
    h, v = shape.hidden, shape.vocabulary
    prediction = "cls.predictions"
    weights = [
        Weight("embeddings.word.weight", ("bert.embeddings.word_embeddings.weight",), (v, h)),
        Weight("embeddings.position.weight", ("bert.embeddings.position_embeddings.weight",), (shape.positions, h)),
        Weight("embeddings.segment.weight", ("bert.embeddings.token_type_embeddings.weight",), (shape.segments, h)),
        *_affine("embeddings.norm", ["bert.embeddings.LayerNorm"], h),
    ]
    for layer in range(shape.layers):
        weights += _layer(f"layers.{layer}", f"bert.encoder.layer.{layer}", h, shape.intermediate)
    pooler = _affine("pooler", ["bert.pooler.dense"], h, h)
    masked_head = [
        *_affine("masked_head.transform", [f"{prediction}.transform.dense"], h, h),
        *_affine("masked_head.norm", [f"{prediction}.transform.LayerNorm"], h),
        Weight("masked_head.bias", (f"{prediction}.bias",), (v,)),
    ]
    next_head = _affine("next_head", ["cls.seq_relationship"], 2, h)
    return weights + (pooler + masked_head + next_head if shape.next_sentence else masked_head)


def architecture(shape: Shape) -> str:
    """Names the class of transformers that has the same heads."""
    return "BertForPreTraining" if shape.next_sentence else "BertForMaskedLM"


def has_next_sentence(names: Iterable[str]) -> bool:
    """Whether weights of these names, transformers' or older ones, have anything of next-sentence prediction."""
    return any(name.removeprefix("bert.").startswith(("pooler.", "cls.seq_relationship.")) for name in names)


def _layer(ours: str, theirs: str, hidden: int, inner: int) -> list[Weight]:
    attention = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
    return [
        *_affine(f"{ours}.attention.qkv", attention, 3 * hidden, hidden),
        *_affine(f"{ours}.attention.output", [f"{theirs}.attention.output.dense"], hidden, hidden),
        *_affine(f"{ours}.attention.norm", [f"{theirs}.attention.output.LayerNorm"], hidden),
        *_affine(f"{ours}.feed_forward.inner", [f"{theirs}.intermediate.dense"], inner, hidden),
        *_affine(f"{ours}.feed_forward.output", [f"{theirs}.output.dense"], hidden, inner),
        *_affine(f"{ours}.feed_forward.norm", [f"{theirs}.output.LayerNorm"], hidden),
    ]


def count_segments(state: Mapping[str, Tensor]) -> int:
    """Counts the segments that our weights tell apart: 1 where all have the embedding of the first."""
    rows = state["embeddings.segment.weight"]
    return 1 if torch.equal(rows, rows[:1].expand_as(rows)) else len(rows)


def with_first_segment_alone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gives every segment the embedding of the first, where no other was trained."""
    rows = state["embeddings.segment.weight"]
    return {**state, "embeddings.segment.weight": rows[:1].expand_as(rows).clone()}


def _affine(ours: str, theirs: Sequence[str], rows: int, *columns: int) -> list[Weight]:
    """The weight and the bias of a linear layer, or of a norm, which has no columns."""
    return [
        Weight(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), (rows, *columns)),
        Weight(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), (rows,)),
    ]


def to_transformers(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Makes of our weights those that transformers saves: new tensors, no padding, no copy of the decoder."""
    weights = list_weights(shape)
    assert state.keys() == {weight.ours for weight in weights}, "not the weights of a whole model of ours"
    theirs: dict[str, Tensor] = {}
    for weight in weights:
        ours = state[weight.ours]
        assert tuple(ours.shape) == weight.padded(shape), f"{weight.ours}: {tuple(ours.shape)}"
        parts = ours[: weight.size[0]].detach().cpu().chunk(len(weight.theirs))
        theirs.update((name, part.clone()) for name, part in zip(weight.theirs, parts, strict=True))
    return theirs


def from_transformers(
    state: Mapping[str, Tensor], shape: Shape, where: str = "these weights"
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Makes of the weights of any BERT ours, in fp32, and names those of ours that it does not have.

    Only whole heads may be missing; whoever loads the rest gives them fresh values. Everything else is an error: a
    weight without a place, a weight of another size, a layer or half a head that is not there.
    """
    found = _with_usual_names(state, where)
    weights, faults, ours = list_weights(shape), [], {}
    places = {name: weight for weight in weights for name in weight.theirs}
    for name, (given, tensor) in found.items():
        size = tuple(tensor.shape)
        if name not in places:
            heads = "its two heads" if shape.next_sentence else "a masked head alone"
            faults.append(f"{given} {size} has no place in a BERT of {shape.layers} layers with {heads}")
        elif size != places[name].part:
            faults.append(f"{given} is {size}; by the config it should be {places[name].part}")
        elif not tensor.is_floating_point():
            faults.append(f"{given} holds {tensor.dtype}; only unquantised weights can be read")
    missing = [weight for weight in weights if not all(name in found for name in weight.theirs)]
    lost = [weight for weight in missing if not _may_be_missing(weight, found)]
    faults += [f"{name} is missing" for weight in lost for name in weight.theirs if name not in found]
    refuse_faults(where, faults)
    for weight in weights:
        if weight not in missing:
            parts = [found[name][1] for name in weight.theirs]
            ours[weight.ours] = _stack(parts, weight.padded(shape))
    return ours, tuple(weight.ours for weight in missing)


def _with_usual_names(state: Mapping[str, Tensor], where: str) -> dict[str, tuple[str, Tensor]]:
    """Finds weights by the names that BertForPreTraining has today; with every one the given name, for messages."""
    found: dict[str, tuple[str, Tensor]] = {}
    for given, tensor in state.items():
        if given.split(".")[-1] == "position_ids":
            continue  # a buffer of older versions: 0, 1, 2, …
        name = given if given.startswith(("bert.", "cls.")) else f"bert.{given}"
        for old, new in OLD_ENDS.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if name in found:
            raise UserError(f"{where}: {found[name][0]} and {given} are the same weight; one of them is too many")
        found[name] = (given, tensor)
    for copy, name in COPIES.items():
        if copy in found:
            given, tensor = found.pop(copy)
            other = found.setdefault(name, (given, tensor))[1]
            if not torch.equal(other, tensor):
                raise UserError(
                    f"{where}: {given} {tuple(tensor.shape)} differs from {name} {tuple(other.shape)}: "
                    "a decoder of its own is not supported, only one tied to the word embeddings"
                )
    return found


def _may_be_missing(weight: Weight, found: Mapping[str, object]) -> bool:
    """Whether the weight is part of a head of which nothing is there."""
    prefix = HEADS.get(weight.ours.partition(".")[0])
    return prefix is not None and not any(name.startswith(prefix) for name in found)


def _stack(parts: Sequence[Tensor], size: tuple[int, ...]) -> Tensor:
    """Puts the rows of the parts one after another, and zeros below them."""
    whole = torch.zeros(size)
    rows = parts[0].shape[0]
    for number, part in enumerate(parts):
        whole[number * rows : (number + 1) * rows] = part
    return whole


def refuse_faults(where: str, faults: list[str]) -> None:
    """Raises UserError with the first faults, if there are any."""
    if faults:
        more = [f"… and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        raise UserError("\n".join([f"{where}: {fault}" for fault in faults[:LISTED]] + more))


def config_of(shape: Shape, pad: int, dtype: torch.dtype) -> dict[str, Any]:
    """Makes the config.json of a folder; `pad` is the id of the piece `[PAD]`."""
    return {
        "architectures": [architecture(shape)],
        "model_type": "bert",
        "hidden_act": "gelu",
        **{theirs: getattr(shape, ours) for ours, theirs in SIZES.items()},
        **{theirs: getattr(shape, ours) for ours, theirs in RATES.items()},
        "initializer_range": 0.02,
        "pad_token_id": pad,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
    }


def shape_of(config: Mapping[str, Any], where: str) -> Shape:
    """Reads the sizes in a config.json; UserError where its model is not one that ours computes."""
    faults = [
        f"{name} is {config[name]!r}; only {values[0]!r} is supported"
        for name, values in SUPPORTED.items()
        if config.get(name, values[0]) not in values
    ]
    refuse_faults(where, faults)  # alone, since another kind of model may have other sizes too
    sizes = {ours: config.get(theirs, DEFAULTS.get(ours)) for ours, theirs in SIZES.items()}
    rates = {ours: config.get(theirs, DEFAULTS.get(ours)) for ours, theirs in RATES.items()}
    faults += [
        f"{SIZES[ours]} is {value!r}; it should be a whole number of 1 or more"
        for ours, value in sizes.items()
        if type(value) is not int or value < 1
    ]
    faults += [
        f"{RATES[ours]} is {value!r}; it should be a number from 0 to 1"
        for ours, value in rates.items()
        if not isinstance(value, int | float) or not 0 <= value < 1
    ]
    if not faults and sizes["hidden"] % sizes["heads"]:
        faults.append(f"hidden_size {sizes['hidden']} cannot be divided among {sizes['heads']} attention heads")
    refuse_faults(where, faults)
    values: dict[str, Any] = {**sizes, **{ours: float(value) for ours, value in rates.items()}}
    return Shape(**values)
