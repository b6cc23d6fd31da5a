"""The names and sizes of weights and settings, in transformers and here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.model.shape import Shape

HEADS = {"pooler": "bert.pooler.", "masked_head": "cls.predictions.", "next_head": "cls.seq_relationship."}
"""what a checkpoint may lack, each as a whole: the first part of our names, and what theirs begin with"""


COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""weights that some versions store twice; both must be the same"""


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
"""settings of a config with the values that our encoder computes; where a config does not say, it means the first"""


SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "segments": "type_vocab_size",
}


RATES = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "epsilon": "layer_norm_eps",
}
"""our names of the numbers in a config, and theirs"""


DEFAULTS = {field.name: field.default for field in fields(Shape) if field.default is not MISSING}


LISTED = 10  # names in a message


@dataclass(frozen=True)
class Weight:
    """A weight in both worlds."""

    ours: str
    theirs: tuple[str, ...]
    """several where ours has their rows one after another"""
    size: tuple[int, ...]
    """of ours without padding"""

    @property
    def part(self) -> tuple[int, ...]:
        """The size of each of theirs."""
        return (self.size[0] // len(self.theirs), *self.size[1:])


def list_weights(shape: Shape) -> list[Weight]:
    """Every weight of an encoder with both heads."""
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
    return [
        *weights,
        *_affine("pooler", ["bert.pooler.dense"], h, h),
        *_affine("masked_head.transform", [f"{prediction}.transform.dense"], h, h),
        *_affine("masked_head.norm", [f"{prediction}.transform.LayerNorm"], h),
        Weight("masked_head.bias", (f"{prediction}.bias",), (v,)),
        *_affine("next_head", ["cls.seq_relationship"], 2, h),
    ]


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


def _affine(ours: str, theirs: Sequence[str], rows: int, *columns: int) -> list[Weight]:
    """The weight and the bias of a linear layer, or of a norm, which has no columns."""
    return [
        Weight(f"{ours}.weight", tuple(f"{each}.weight" for each in theirs), (rows, *columns)),
        Weight(f"{ours}.bias", tuple(f"{each}.bias" for each in theirs), (rows,)),
    ]


def to_transformers(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Our weights as those that BertForPreTraining saves: no padding, no copy of the decoder. Tensors of their own."""
    weights = list_weights(shape)
    assert state.keys() == {weight.ours for weight in weights}, "not the weights of a whole model of ours"
    theirs: dict[str, Tensor] = {}
    for weight in weights:
        ours = state[weight.ours]
        assert tuple(ours.shape) == _padded(weight, shape), f"{weight.ours}: {tuple(ours.shape)}"
        parts = ours[: weight.size[0]].detach().cpu().chunk(len(weight.theirs))
        theirs.update((name, part.clone()) for name, part in zip(weight.theirs, parts, strict=True))
    return theirs


def from_transformers(
    state: Mapping[str, Tensor], shape: Shape, where: str = "these weights"
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Weights of any BERT as ours, in fp32, and the names of ours that it does not have.

    Only whole heads may be missing; whoever loads the rest gives them fresh values. Everything else is an error: a
    weight without a place, a weight of another size, a layer or half a head that is not there.
    """
    found = _with_usual_names(state, where)
    weights, faults, ours = list_weights(shape), [], {}
    places = {name: weight for weight in weights for name in weight.theirs}
    for name, (given, tensor) in found.items():
        size = tuple(tensor.shape)
        if name not in places:
            faults.append(f"{given} {size} has no place in a BERT of {shape.layers} layers with its two heads")
        elif size != places[name].part:
            faults.append(f"{given} is {size}; by the config it should be {places[name].part}")
        elif not tensor.is_floating_point():
            faults.append(f"{given} holds {tensor.dtype}; only unquantised weights can be read")
    missing = [weight for weight in weights if not all(name in found for name in weight.theirs)]
    lost = [weight for weight in missing if not _may_be_missing(weight, found)]
    faults += [f"{name} is missing" for weight in lost for name in weight.theirs if name not in found]
    _refuse(where, faults)
    for weight in weights:
        if weight not in missing:
            parts = [found[name][1] for name in weight.theirs]
            ours[weight.ours] = _stack(parts, _padded(weight, shape))
    return ours, tuple(weight.ours for weight in missing)


def _with_usual_names(state: Mapping[str, Tensor], where: str) -> dict[str, tuple[str, Tensor]]:
    """By the names that BertForPreTraining has today: the given name, for messages, and the weight."""
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
    """Whether it is part of a head of which nothing is there."""
    prefix = HEADS.get(weight.ours.partition(".")[0])
    return prefix is not None and not any(name.startswith(prefix) for name in found)


def _stack(parts: Sequence[Tensor], size: tuple[int, ...]) -> Tensor:
    """Their rows one after another, zeros below."""
    whole = torch.zeros(size)
    rows = parts[0].shape[0]
    for number, part in enumerate(parts):
        whole[number * rows : (number + 1) * rows] = part
    return whole


def _padded(weight: Weight, shape: Shape) -> tuple[int, ...]:
    """The size of ours as the model holds it."""
    of_vocabulary = weight.ours in ("embeddings.word.weight", "masked_head.bias")
    return (shape.padded_vocabulary if of_vocabulary else weight.size[0], *weight.size[1:])


def _refuse(where: str, faults: list[str]) -> None:
    """Raises UserError if there are faults, with the first of them."""
    if faults:
        more = [f"… and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        raise UserError("\n".join([f"{where}: {fault}" for fault in faults[:LISTED]] + more))


def config_of(shape: Shape, pad: int, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a folder; `pad` is the id of the piece `[PAD]`."""
    return {
        "architectures": ["BertForPreTraining"],
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
    """The sizes that a config.json speaks of; UserError where it is of a model that ours is not."""
    faults = [
        f"{name} is {config[name]!r}; only {values[0]!r} is supported"
        for name, values in SUPPORTED.items()
        if config.get(name, values[0]) not in values
    ]
    _refuse(where, faults)  # alone, since another kind of model may have other sizes too
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
    _refuse(where, faults)
    values: dict[str, Any] = {**sizes, **{ours: float(value) for ours, value in rates.items()}}
    return Shape(**values)
