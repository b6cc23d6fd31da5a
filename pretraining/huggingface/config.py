"""Converts config.json of transformers: the sizes of an encoder and its heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from data_prep.common.errors import UserError
from pretraining.huggingface.weights import ARCHITECTURES, Kind, TaskHead, refuse_faults
from pretraining.model.shape import OBJECTIVE, Sees, Shape
from pretraining.objectives.declaration import find_objective, objectives

if TYPE_CHECKING:
    from data_prep.vocabulary.vocabulary import Special

OWN_TYPES: dict[Sees, str] = {"before": "cloze-ltr", "after": "cloze-rtl"}
"""The `model_type` of models that no class of transformers computes, by the direction of attention. transformers
refuses to load them, rather than take them for an ordinary BERT."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("bert", *OWN_TYPES.values()),
    "is_decoder": (False, True),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}
"""Settings of a config with the values that our encoder supports, the default first."""
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "segments": "type_vocab_size",
}
"""Integers in a config: our names, and those in transformers."""
FRACTIONS = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "epsilon": "layer_norm_eps",
}
"""Fractions in a config: our names, and those in transformers."""
DEFAULTS = {field.name: field.default for field in fields(Shape) if field.default is not MISSING}
PROBLEMS: dict[str, Kind] = {
    "single_label_classification": "classes",
    "multi_label_classification": "labels",
    "regression": "score",
}
"""The `problem_type` in transformers of the kinds of heads for whole sequences."""
OWN_NAMES = ("Bert", "Cloze")
"""Prefix of classes of transformers, and its replacement for a model that only has the same heads."""
GENERIC = re.compile(r"LABEL_\d+")
"""The names that transformers gives to unnamed labels."""


def make_config(shape: Shape, special: Special, dtype: torch.dtype, head: TaskHead | None = None) -> dict[str, Any]:
    """Makes the config.json of a model with the heads of pre-training or that of a task."""
    architecture = head.architecture if head else find_objective(shape).architecture(shape)
    theirs = is_theirs(shape, head)
    ends = {"bos_token_id": special.cls, "eos_token_id": special.sep}  # of what transformers generates
    return {
        "architectures": [architecture if theirs else architecture.replace(*OWN_NAMES)],
        "model_type": "bert" if theirs else OWN_TYPES[shape.sees],
        "hidden_act": "gelu",
        **{theirs: getattr(shape, ours) for ours, theirs in (SIZES | FRACTIONS).items()},
        "initializer_range": 0.02,
        "pad_token_id": special.pad,
        "tie_word_embeddings": True,
        **({"is_decoder": True, **ends} if theirs and shape.one_way else {}),
        "dtype": str(dtype).removeprefix("torch."),
        **(_write_labels(head) if head else {}),
    }


def is_theirs(shape: Shape, head: TaskHead | None = None) -> bool:
    """Whether a class of transformers computes the same model: attention to both sides, or to earlier pieces only
    without a pooler, which reads [CLS]."""
    pooled = head.has_pooler if head else "pooler" in find_objective(shape).exported_heads(shape)
    return shape.sees == "both" or (shape.sees == "before" and not pooled)


def _write_labels(head: TaskHead) -> dict[str, Any]:
    """Makes the entries of a config on a head: the names of its outputs and, for whole sequences, their type."""
    if head.kind in ("choice", "spans"):
        return {}
    labels = head.labels or ("LABEL_0",)
    problem = [("problem_type", name) for name, kind in PROBLEMS.items() if kind == head.kind]
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        **dict(problem),
    }


def parse_shape(config: Mapping[str, Any], where: str) -> Shape:
    """Parses the sizes in a config.json; raises UserError for a model that ours cannot compute."""
    faults = [
        f"{name} is {config[name]!r}; only {values[0]!r} is supported"
        for name, values in SUPPORTED.items()
        if config.get(name, values[0]) not in values
    ]
    refuse_faults(where, faults)  # first: another kind of model may have other sizes too
    sizes = {ours: config.get(theirs, DEFAULTS.get(ours)) for ours, theirs in SIZES.items()}
    fractions = {ours: config.get(theirs, DEFAULTS.get(ours)) for ours, theirs in FRACTIONS.items()}
    faults += [
        f"{SIZES[ours]} is {value!r}; it should be a whole number of 1 or more"
        for ours, value in sizes.items()
        if type(value) is not int or value < 1
    ]
    faults += [
        f"{FRACTIONS[ours]} is {value!r}; it should be a number from 0 to 1"
        for ours, value in fractions.items()
        if not isinstance(value, int | float) or not 0 <= value < 1
    ]
    if not faults and sizes["hidden"] % sizes["heads"]:
        faults.append(f"hidden_size {sizes['hidden']} cannot be divided among {sizes['heads']} attention heads")
    refuse_faults(where, faults)
    values: dict[str, Any] = {**sizes, **{ours: float(value) for ours, value in fractions.items()}}
    theirs: Sees = "before" if config.get("is_decoder") else "both"
    sees = next((sees for sees, name in OWN_TYPES.items() if name == config.get("model_type")), theirs)
    return _add_objective(Shape(**values, sees=sees), _parse_class(config), where)


def _parse_class(config: Mapping[str, Any]) -> str:
    """Parses the class of transformers that a config.json names; empty if none."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    theirs, ours = OWN_NAMES
    return name.replace(ours, theirs) if config.get("model_type") in OWN_TYPES.values() else name


def _add_objective(shape: Shape, architecture: str, where: str) -> Shape:
    """Adds an objective with the same direction of attention, if possible one that exports this class; of several the
    default."""
    looking = [name for name, objective in objectives().items() if objective.sees == shape.sees]
    if not looking:
        seen = {"both": "both ways", "before": "those before it alone", "after": "those after it alone"}[shape.sees]
        raise UserError(
            f"{where}: a piece sees {seen}, as in no objective of {', '.join(objectives())}; put back the file of one "
            "in pretraining/objectives/ where it does"
        )
    looking.sort(key=lambda name: name != OBJECTIVE)
    shapes = [
        replace(shape, objective=name, pairs=pairs)
        for name in looking
        for pairs in ((True, False) if objectives()[name].pairs != "unused" else (False,))
    ]
    return next((one for one in shapes if objectives()[one.objective].architecture(one) == architecture), shapes[0])


def parse_head(config: Mapping[str, Any], where: str) -> TaskHead | None:
    """Parses the head of a task in a config.json; None if there is none."""
    kinds = [kind for kind, name in ARCHITECTURES.items() if name == _parse_class(config)]
    if not kinds:
        return None
    if kinds[0] in ("choice", "spans"):
        return TaskHead(kinds[0])
    labels = _read_labels(config, where)
    if kinds[0] == "tags":
        return TaskHead("tags", labels)
    problem = config.get("problem_type") or ("regression" if len(labels) == 1 else "single_label_classification")
    if problem not in PROBLEMS:
        raise UserError(f"{where}: problem_type is {problem!r}; it should be one of {', '.join(PROBLEMS)}")
    if PROBLEMS[problem] != "score":
        return TaskHead(PROBLEMS[problem], labels)
    if len(labels) != 1:
        raise UserError(f"{where}: a regression of {len(labels)} numbers at once; only one number is supported")
    return TaskHead("score")


def _read_labels(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Reads the names of the labels in the order of their ids; by default those of transformers."""
    count, names = config.get("num_labels", 2), config.get("id2label")
    if names is None and type(count) is int and count > 0:
        return tuple(f"LABEL_{number}" for number in range(count))
    by_id = {str(number): str(name) for number, name in names.items()} if isinstance(names, dict) else {}
    ids = [str(number) for number in range(len(by_id))]
    if not ids or by_id.keys() != set(ids):
        raise UserError(f"{where}: id2label should name the labels 0, 1, 2, …, or num_labels count them; it is {names}")
    return tuple(by_id[number] for number in ids)
