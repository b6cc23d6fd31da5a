"""Converts config.json of transformers: the sizes of an encoder and its heads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from data_prep.common.errors import UserError
from pretraining.architectures.declaration import architectures, find_architecture
from pretraining.architectures.weights import Kind, TaskHead
from pretraining.huggingface.weights import (
    AUTO_CLASSES,
    find_auto_class,
    is_theirs,
    list_class_names,
    name_class,
    refuse_faults,
)
from pretraining.model.shape import ARCHITECTURE, OBJECTIVE, Learning, Sees, Shape
from pretraining.objectives.declaration import configure_objective, find_objective, objectives

if TYPE_CHECKING:
    from data_prep.vocabulary.vocabulary import Special

SUPPORTED: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "pruned_heads": (None, {})}
"""Settings of any config with the values that our encoders support, the default first."""
SAME = {"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_new"}
"""Names in transformers that stand for the same function as another one."""
PROBLEMS: dict[str, Kind] = {
    "single_label_classification": "classes",
    "multi_label_classification": "labels",
    "regression": "score",
}
"""The `problem_type` in transformers of the kinds of heads for whole sequences."""
NAMELESS: tuple[Kind, ...] = ("choice", "spans", "embeddings")
"""The kinds of heads whose outputs have no names."""
POOLINGS = ("cls", "mean")
"""What a head reads of a sequence: [CLS], or the mean of all pieces."""
OWN = "cloze"
"""The entry with what no class of transformers tells."""
GENERIC = re.compile(r"LABEL_\d+")
"""The names that transformers gives to unnamed labels."""


def make_config(shape: Shape, special: Special, dtype: torch.dtype, head: TaskHead | None = None) -> dict[str, Any]:
    """Makes the config.json of a model with the heads of pre-training or that of a task."""
    theirs, kind = is_theirs(shape, head), find_architecture(shape.architecture)
    names = [*kind.config_marks, *(("bos_token_id", "eos_token_id") if theirs and shape.one_way else ())]
    ids = {"bos_token_id": special.cls, "cls_token_id": special.cls}
    return {
        "architectures": [name_class(shape, head)],
        "model_type": kind.model_type if theirs else name_own_type(shape),
        **kind.config(shape),
        **({kind.pooling_name: "mean" if head is None or head.averages else "cls"} if kind.pooling_name else {}),
        "pad_token_id": special.pad,
        "tie_word_embeddings": True,
        **({"is_decoder": True} if theirs and shape.one_way and "both" in kind.sees else {}),
        **{name: ids.get(name, special.sep) for name in names},
        **({} if head else _name_objective(shape)),
        "dtype": str(dtype).removeprefix("torch."),
        **(_write_labels(head) if head else {}),
    }


def _name_objective(shape: Shape) -> dict[str, Any]:
    """Makes the entry of config.json that names the objective, where the class of transformers fits several."""
    if not find_objective(shape).named_in_config:
        return {}
    return {OWN: {"objective": shape.learns.objective, **dict(shape.learns.settings)}}


def name_own_type(shape: Shape) -> str:
    """Names the `model_type` of a model that no class of transformers computes: transformers refuses to load it, rather
    than take it for an ordinary one."""
    kind = [] if shape.architecture == ARCHITECTURE else [shape.architecture]
    return "-".join(["cloze", *kind, *({"before": ["ltr"], "after": ["rtl"]}.get(shape.learns.sees, []))])


def _write_labels(head: TaskHead) -> dict[str, Any]:
    """Makes the entries of a config on a head: the names of its outputs and, for whole sequences, their type."""
    if head.kind in NAMELESS:
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
    name, sees = _find_type(config, where)
    kind = find_architecture(name)
    constants = {name: (value,) for name, value in kind.config_constants.items()}
    _refuse_values(config, where, {**kind.config_values, **constants, **SUPPORTED})
    faults = list[str]()
    try:
        theirs, values, config = kind.list_config_names(), {}, kind.adapt_config(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for field in (field for field in fields(kind.shape_type) if field.name in theirs):
        default = kind.config_defaults.get(field.name, None if field.default is MISSING else field.default)
        value = values[field.name] = config.get(theirs[field.name], default)
        if field.type == "int" and (type(value) is not int or value < 1):
            faults.append(f"{theirs[field.name]} is {value!r}; it should be a whole number of 1 or more")
        elif field.type == "float" and (not isinstance(value, int | float) or not 0 <= value < math.inf):
            faults.append(f"{theirs[field.name]} is {value!r}; it should be a number, 0 or more")
        elif field.type == "float" and value >= 1 and field.compare and default is not None and default < 1:
            faults.append(f"{theirs[field.name]} is {value!r}; it should be a number from 0 to 1")
        elif field.type == "float":
            values[field.name] = float(value)
    if not faults and values["hidden"] % values["heads"]:
        width = f"{theirs['hidden']} {values['hidden']}"
        faults.append(f"{width} cannot be divided among {values['heads']} attention heads")
    refuse_faults(where, faults)
    shape = kind.shape_type(architecture=name, learns=Learning(sees=sees), **values)
    refuse_faults(where, list(kind.faults(shape)))
    return _add_objective(shape, config, where)


def _refuse_values(config: Mapping[str, Any], where: str, supported: Mapping[str, Sequence[Any]]) -> None:
    """Raises UserError for values in a config.json that are not supported; the first is what absence means."""
    faults = [
        f"{name} is {config[name]!r}; only {' or '.join(map(repr, values))} is supported"
        for name, values in supported.items()
        if name in config and SAME.get(str(config[name]), config[name]) not in values
    ]
    refuse_faults(where, faults)


def _find_type(config: Mapping[str, Any], where: str) -> tuple[str, Sees]:
    """Finds the architecture of a config.json, and the direction of its attention."""
    given = str(config.get("model_type", find_architecture(ARCHITECTURE).model_type))
    theirs = {kind.model_type: name for name, kind in architectures().items() if kind.model_type}
    if (name := theirs.get(given)) is not None:
        ways = architectures()[name].sees
        if config.get("is_decoder") and "before" not in ways:
            raise UserError(f"{where}: is_decoder is True; only False is supported")
        return name, "before" if config.get("is_decoder") or "both" not in ways else "both"
    for name, kind in architectures().items():
        for sees in kind.sees:
            if name_own_type(Shape(1, 1, 1, 1, 1, architecture=name, learns=Learning(sees=sees))) == given:
                return name, sees
    known = f"{', '.join(map(repr, theirs))} {'is' if len(theirs) == 1 else 'are'} supported"
    raise UserError(f"{where}: model_type is {given!r}; only {known}")


def _read_class(config: Mapping[str, Any]) -> str:
    """Reads the class that a config.json names; empty if none."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _add_objective(shape: Shape, config: Mapping[str, Any], where: str) -> Shape:
    """Adds the objective that is named; otherwise one with the same direction of attention. If possible it is one that
    exports this class, with or without heads for pairs; of several the default."""
    kind = find_architecture(shape.architecture)
    names = [name for name, one in objectives().items() if one.sees == shape.learns.sees and not one.named_in_config]
    found = [shape.change_learning(objective=name) for name in sorted(names, key=lambda name: name != OBJECTIVE)]
    if OWN in config:
        found = [_read_objective(shape, config[OWN], where)]
    if not found:
        known = ", ".join(objectives())
        raise UserError(f"{where}: sees as no objective of {known}; put back its file in pretraining/objectives/")
    shapes = [
        one.change_learning(pairs=pairs)
        for one in found
        for pairs in ((True, False) if find_objective(one).uses_pairs and kind.learns_pairs(one) else (False,))
    ]
    named = _read_class(config)
    exporting = (one for one in shapes if named and named in list_class_names(kind, find_auto_class(one)))
    return next(exporting, shapes[0])


def _read_objective(shape: Shape, named: Any, where: str) -> Shape:
    """Reads the entry of `_name_objective`."""
    try:
        kind = objectives()[named["objective"]]
        given = {**named, "name": named["objective"]}
        del given["objective"]
        learns = configure_objective(kind.settings_type.model_validate(given)).learning(has_pairs=False)
        if learns.sees == shape.learns.sees:
            return replace(shape, learns=learns)
    except (KeyError, TypeError, ValueError):  # of pydantic, too
        pass
    raise UserError(f"{where}: {OWN} is {named!r}; it should name an objective as export.py does; export it anew")


def parse_head(config: Mapping[str, Any], where: str) -> TaskHead | None:
    """Parses the head of a task in a config.json; None if there is none."""
    named = _read_class(config)
    every = architectures().values()
    kinds = [
        kind
        for kind, auto in AUTO_CLASSES.items()
        if any(named in list_class_names(one, auto) for one in every if named)
    ]
    if not kinds:
        return None
    head, name = _parse_outputs(kinds[0], config, where), find_architecture(_find_type(config, where)[0]).pooling_name
    if not name or not head.has_pooler:
        return head
    _refuse_values(config, where, {name: POOLINGS})
    return replace(head, averages=config.get(name) == "mean")


def _parse_outputs(kind: Kind, config: Mapping[str, Any], where: str) -> TaskHead:
    """Parses a head of this kind, with the names of its outputs."""
    if kind in NAMELESS:
        return TaskHead(kind)
    labels = _read_labels(config, where)
    if kind == "tags":
        return TaskHead("tags", labels)
    problem = config.get("problem_type") or ("regression" if len(labels) == 1 else "single_label_classification")
    if not isinstance(problem, str) or problem not in PROBLEMS:
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
