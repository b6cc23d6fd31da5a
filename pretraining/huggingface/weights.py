"""The weights of transformers: their conversion, as the architecture declares them, and their files.

A file has checksums in its header, of itself and of the files beside it; transformers ignores these. The checksum of a
file is computed with zeros in its own place. Files without checksums are read unchecked.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import warnings
from collections.abc import Iterable, Mapping
from operator import ne
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import BLOCK, replacing, sha256
from pretraining.architectures.declaration import Architecture, find_architecture
from pretraining.architectures.weights import Kind, Rows, TaskHead, Weight
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import find_objective

Heads = Literal["pre-training", "none"] | TaskHead
"""The heads on an encoder: those of pre-training; none but a pooler, if there is one; or the head of a task."""
AUTO_CLASSES: dict[Kind, str] = {
    **dict.fromkeys(("classes", "labels", "score"), "AutoModelForSequenceClassification"),
    "choice": "AutoModelForMultipleChoice",
    "spans": "AutoModelForQuestionAnswering",
    "tags": "AutoModelForTokenClassification",
    "embeddings": "AutoModel",
}
"""The classes of transformers that find a model with the same head."""
LISTED = 10
"""Number of faults that a message lists."""
STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in the header."""
SIZE = 8
"""Bytes before the header, with its length."""
BEFORE, DIGITS = b'{"__metadata__":{"format":"pt","cloze_sha256":"', 64
"""Begin of the header of a file with a checksum."""
BESIDE = "cloze_files"
"""Key in the header for the checksums of files beside it, as NAME=CHECKSUM."""
EDITED = ("config.json", "tokenizer_config.json")
"""Files that people edit, for example to name labels; their other content is compared with the weights."""
CHANGED = 8
"""Number of bytes by which that begin may differ and still count as a damaged one."""


def find_auto_class(shape: Shape, head: TaskHead | None = None) -> str:
    """Returns the AutoModel class that finds a model with the heads of pre-training or that of a task."""
    return AUTO_CLASSES[head.kind] if head else find_objective(shape).auto_class(shape)


def is_theirs(shape: Shape, head: TaskHead | None = None) -> bool:
    """Whether a class of transformers computes the same model."""
    kind = find_architecture(shape.architecture)
    pooled = head.has_pooler if head else "pooler" in find_objective(shape).exported_heads(shape)
    return find_auto_class(shape, head) in kind.classes and kind.is_theirs(shape, pooled)


def name_class(shape: Shape, head: TaskHead | None = None) -> str:
    """Names the class of transformers with the same heads, or of our own where none computes the same model."""
    theirs, ours = list_class_names(find_architecture(shape.architecture), find_auto_class(shape, head))
    return theirs if is_theirs(shape, head) else ours


def list_class_names(kind: Architecture, auto: str) -> tuple[str, str]:
    """Lists the names of the class that an AutoModel class finds: that of transformers, empty if none, and our own."""
    theirs = kind.classes.get(auto, "")
    return theirs, "Cloze" + (theirs.removeprefix(kind.class_prefix) or auto.removeprefix("AutoModel") or "Model")


def list_weights(shape: Shape, heads: Heads = "pre-training") -> list[Weight]:
    """Lists all weights of an encoder with its heads."""
    kind = find_architecture(shape.architecture)
    weights, of_pretraining = kind.weights(shape), kind.heads(shape)
    if heads == "none":
        pooler = of_pretraining.get("pooler", [])
        return weights + [weight for weight in pooler if not weight.theirs[0].startswith(kind.untrained)]
    if isinstance(heads, TaskHead):
        return weights + (kind.task_head(shape, heads) if heads.kind != "embeddings" else [])
    exported = (of_pretraining[name] for name in find_objective(shape).exported_heads(shape))
    return [*weights, *itertools.chain.from_iterable(exported)]


def has_pairs(names: Iterable[str], shape: Shape) -> bool:
    """Whether weights of these names include a head that only pairs train, by the objective of this shape."""
    kind, objective = find_architecture(shape.architecture), find_objective(shape)
    if not kind.learns_pairs(shape):
        return False
    with_pairs, without = (objective.heads(shape.change_learning(pairs=pairs)) for pairs in (True, False))
    heads = kind.heads(shape)
    paired = [weight for name in with_pairs.keys() - without.keys() for weight in heads.get(name, [])]
    whole = {_complete_name(name, kind) for name in names}
    return any(not whole.isdisjoint(weight.theirs) for weight in paired)


def list_row_names(shape: Shape, rows: Rows) -> list[str]:
    """Lists our weights that have a row for each piece, position or segment."""
    kind = find_architecture(shape.architecture)
    own = find_objective(shape).own_weights(shape)
    every = itertools.chain(kind.weights(shape), *kind.heads(shape).values(), own)
    return [weight.ours for weight in every if weight.rows == rows]


def count_segments(state: Mapping[str, Tensor], shape: Shape) -> int:
    """Counts the segments with embeddings of their own: 1 if all equal the first."""
    tables = [state[name] for name in list_row_names(shape, "segments")]
    return max((len(rows) for rows in tables if not torch.equal(rows, rows[:1].expand_as(rows))), default=1)


def repeat_segment(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Gives every segment the embedding of the first, since no other was trained."""
    tables = {name: state[name] for name in list_row_names(shape, "segments")}
    return {**state, **{name: rows[:1].expand_as(rows).clone() for name, rows in tables.items()}}


def export_weights(state: Mapping[str, Tensor], shape: Shape, heads: Heads = "pre-training") -> dict[str, Tensor]:
    """Converts our weights to those of transformers, without padding and copies of the decoder; most are views."""
    weights = list_weights(shape, heads)
    assert state.keys() == {weight.ours for weight in weights}, "not the weights of a whole model of ours"
    theirs: dict[str, Tensor] = {}
    for weight in weights:
        ours = state[weight.ours]
        assert tuple(ours.shape) == weight.pad_size(shape), f"{weight.ours}: {tuple(ours.shape)}"
        parts = ours[: weight.size[0]].detach().cpu().chunk(len(weight.theirs))
        blank = [parts[0].new_zeros(weight.before, *parts[0].shape[1:])] * bool(weight.before)
        whole = (torch.cat([*blank, part]) if blank else part for part in parts)
        turned = [part.T if weight.transposed else part for part in whole]
        theirs.update(zip(weight.theirs, turned, strict=True))
    return theirs


def import_weights(
    state: Mapping[str, Tensor], shape: Shape, where: str = "these weights", heads: Heads = "pre-training"
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Converts the weights of transformers to ours, in fp32; returns also the names of ours that are missing.

    Only whole heads of pre-training may be missing; the caller initialises them. Other heads than `heads` are left out,
    unless `heads` are those of pre-training. Raises UserError for an unknown weight, a wrong size, a missing layer or
    half a head.
    """
    kind = find_architecture(shape.architecture)
    unasked = kind.untrained if heads == "pre-training" else kind.head_prefixes
    found = _rename_weights(state, where, kind, unasked)
    weights, faults, ours = list_weights(shape, heads), [], {}
    places = {name: weight for weight in weights for name in weight.theirs}
    for name, (given, tensor) in found.items():
        size = tuple(tensor.shape)
        if name not in places:
            if not name.startswith(unasked):
                faults.append(f"{given} {size} has no place in a {kind.title} of {shape.layers} layers")
        elif size != places[name].part:
            faults.append(f"{given} is {size}; by the config it should be {places[name].part}")
        elif not tensor.is_floating_point():
            faults.append(f"{given} holds {tensor.dtype}; only unquantised weights can be read")
    missing = [weight for weight in weights if not all(name in found for name in weight.theirs)]
    declared = {} if isinstance(heads, TaskHead) else kind.heads(shape)
    absent = [head for head, own in declared.items() if not any(name in found for each in own for name in each.theirs)]
    lost = [weight for weight in missing if weight.ours.partition(".")[0] not in absent]
    faults += [f"{name} is missing" for weight in lost for name in weight.theirs if name not in found]
    refuse_faults(where, faults)
    check_finite(where, {given: tensor for name, (given, tensor) in found.items() if name in places})
    for weight in weights:
        if weight not in missing:
            whole = ours[weight.ours] = torch.zeros(weight.pad_size(shape))
            parts = [found[name][1][weight.before :] for name in weight.theirs]
            rows = whole[: weight.size[0]].chunk(len(parts))  # without a joined copy, whose memory the heap would keep
            for part, own in zip(parts, rows, strict=True):
                own.copy_(part.T if weight.transposed else part)
    return ours, tuple(weight.ours for weight in missing)


def _rename_weights(
    state: Mapping[str, Tensor], where: str, kind: Architecture, unasked: tuple[str, ...]
) -> dict[str, tuple[str, Tensor]]:
    """Returns the weights by their current names in transformers, each with its given name for messages.

    Raises UserError for a decoder that is not tied to the word embeddings, unless its head is left out.
    """
    found: dict[str, tuple[str, Tensor]] = {}
    for given, tensor in state.items():
        if given.endswith(kind.buffers):
            continue
        name = _complete_name(given, kind)
        if name in found:
            raise UserError(f"{where}: {found[name][0]} and {given} are the same weight; one of them is too many")
        found[name] = (given, tensor)
    for copy, name in kind.copies.items():
        if copy in found:
            given, tensor = found.pop(copy)
            other = found.setdefault(name, (given, tensor))[1]
            if not copy.startswith(unasked) and not torch.equal(other, tensor):
                raise UserError(
                    f"{where}: {given} {tuple(tensor.shape)} differs from {name} {tuple(other.shape)}: "
                    "a decoder of its own is not supported, only one tied to the word embeddings"
                )
    return found


def _complete_name(given: str, kind: Architecture) -> str:
    """Completes the name of a weight as a model with heads has it today."""
    beginnings = (kind.trunk, *(f"{prefix.partition('.')[0]}." for prefix in kind.head_prefixes))
    name = given if given.startswith(beginnings) else kind.trunk + given
    for old, new in kind.old_ends.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def check_finite(where: str, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Raises UserError with the names of weights that are not finite, also when converted to `dtype`."""
    wrong = [name for name, weight in weights.items() if not weight.to(dtype or weight.dtype).isfinite().all()]
    refuse_faults(where, [f"{name} has values that are no numbers" for name in wrong])


def refuse_faults(where: str, faults: list[str]) -> None:
    """Raises UserError with the first faults, if there are any."""
    if faults:
        raise UserError("\n".join(f"{where}: {fault}" for fault in faults[:LISTED]))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors into a file with the mode of new files; safetensors makes it readable by its owner only."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path)
    path.chmod(mode)


def write_weights(
    weights: Mapping[str, Tensor], path: Path, beside: Iterable[str] = (), dtype: torch.dtype = torch.float32
) -> None:
    """Writes a weight file with its checksum and those of files beside it. Equal contents have equal bytes.

    Weights are converted to `dtype` and written one after another, so that one at a time is copied. They may be views
    of the same memory, which safetensors refuses to write.
    """
    there = [f"{name}={sha256(path.with_name(name))}" for name in beside if path.with_name(name).is_file()]
    files = {BESIDE: " ".join(there)} if there else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "cloze_sha256": "0" * DIGITS, **files}}
    end = 0
    for name, weight in (ordered := sorted(weights.items())):
        begin, end = end, end + weight.numel() * dtype.itemsize
        header[name] = {"dtype": STORED_AS[dtype], "shape": [*weight.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % SIZE)
    with replacing(path) as file:  # the weights may be a view of the file that is at this path
        file.write(len(text).to_bytes(SIZE, "little") + text)
        for _, weight in ordered:
            file.write(weight.detach().to(dtype).reshape(-1).view(torch.uint8).numpy().data)
        checksum = _checksum(file)
        file.seek(SIZE + len(BEFORE))
        file.write(checksum)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file; raises DamageError if it, or a file beside it, does not have its checksum."""
    weights = load_file(path)
    with path.open("rb") as file:
        file.seek(SIZE)
        begin = file.read(len(BEFORE) + DIGITS)
        has_one = len(begin) == len(BEFORE) + DIGITS and sum(map(ne, begin, BEFORE)) <= CHANGED
        if has_one and begin[len(BEFORE) :] != _checksum(file):
            raise DamageError(
                f"{path}: its SHA-256 is not that of its header: the content changed after it was written; copy it "
                "again, make it anew, or save what another program made of it without the metadata of its header"
            )
    with safe_open(path, "pt") as header:
        for name, _, checksum in (file.partition("=") for file in (header.metadata() or {}).get(BESIDE, "").split()):
            if not name or name != Path(name).name:
                raise DamageError(f"{path}: its header tells of {name!r}, which is no name of a file beside it")
            beside = path.with_name(name)
            if beside.is_file() and sha256(beside) != checksum:
                fault = f"{beside}: its SHA-256 is not the one in the header of {path.name}: it changed after both were"
                fault += " written; copy it again, or save the weights anew with transformers"
                if name not in EDITED:
                    raise DamageError(fault)
                warnings.warn(fault, stacklevel=2)
    return weights


def _checksum(file: BinaryIO) -> bytes:
    """Computes the checksum of a file with zeros in its place."""
    file.seek(0)
    digest = hashlib.sha256(file.read(SIZE + len(BEFORE)) + b"0" * DIGITS)
    file.seek(DIGITS, os.SEEK_CUR)
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest().encode()
