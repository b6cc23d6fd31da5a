"""Begins a run with the weights of another model.

The recipe takes its sizes from that model, and the data must have its pieces with the same ids. The vocabulary may have
more pieces, and the recipe more positions; their embeddings are new.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_prep.common.errors import DamageError, SharedError, UserError, quote
from data_prep.vocabulary.kinds.declaration import find_kind
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.checkpoint.models import StoredModel, find_model_folder
from pretraining.checkpoint.record import CheckpointRecord, is_finished, list_finished, read_record
from pretraining.checkpoint.state import RunState, Saved
from pretraining.data.corpora import Corpora
from pretraining.huggingface.weights import count_segments, list_row_names
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import find_objective, list_heads
from pretraining.training.skips import Skip


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins or continues."""

    model: PretrainingModel
    state: RunState
    """progress of the run, and what the weights were trained on before"""
    latest: Saved | None
    """checkpoint of the weights; None for a new run"""
    skips: list[Skip]
    begins: str | None = None
    """one line on the model that a new run begins with; None if its weights are drawn at random"""


def check_data(origin: StoredModel, corpora: Corpora) -> None:
    """Raises UserError unless the data has the pieces of the model with the same ids."""
    data, vocabulary = corpora.folder, read_vocabulary(corpora.folder)
    if vocabulary.sha256 != corpora.common.vocabulary.sha256:
        raise DamageError(f"{data / vocabulary.file}: not what the data was made with; copy it again")
    if fault := find_difference(origin, vocabulary):
        raise UserError(f"--data {data}: {fault}; make the data with shard.py --vocab {quote(origin.name)}")


def find_difference(origin: StoredModel, ours: Vocabulary) -> str | None:
    """Says why a vocabulary does not extend that of the model; None if it does."""
    name, theirs = origin.name, origin.vocabulary
    kinds = [f"{find_kind(one.kind).title}, {'cased' if one.cased else 'uncased'}" for one in (theirs, ours)]
    if kinds[0] != kinds[1]:
        return f"the vocabulary of {name} is {kinds[0]}, that of the data {kinds[1]}"
    for number, (their, our) in enumerate(zip(theirs.pieces, ours.pieces, strict=False)):
        if their != our:
            return f"piece {number:,} is {their!r} in {name} and {our!r} in the data"
    if len(ours) < len(theirs):
        return f"{name} has {len(theirs):,} pieces, the data only the first {len(ours):,} of them"
    if len(ours) == len(theirs) and ours.sha256 != theirs.sha256:
        return f"the data cuts text with the pieces of {name} in another way"
    return None


class OriginFinder:
    """Finds the base model of a recipe when its sizes are needed."""

    def __init__(self, out: Path | None, name: str | None = None) -> None:
        """`out` is the folder of the run: a run that continues no longer needs its base model.

        All ranks construct it together: a model on the hub is fetched here, by the `name` in the recipe. An error is
        kept until the recipe asks for the sizes.
        """
        self._out = out
        self._found: Path | UserError | None = None
        if name and (out is None or read_recorded_shape(out) is None):
            try:
                self._found = find_model_folder(name)
            except SharedError:
                raise
            except UserError as error:
                self._found = error
        self.origin: StoredModel | None = None
        """the base model; None if the recipe names none, or the run continues"""

    def shape(self, name: str) -> Shape:
        """Returns the sizes of the model, or of the run that began with it."""
        if self._out is not None and (shape := read_recorded_shape(self._out)) is not None:
            return shape
        if isinstance(self._found, UserError):
            raise self._found
        self.origin = StoredModel.open(name, self._found)
        return self.origin.shape


def read_recorded_shape(out: Path) -> Shape | None:
    """Reads the sizes from the newest readable checkpoint of a run; None if there is none."""
    record = _read_newest(out)
    return None if record is None else record.shape


def read_recorded_base(out: Path) -> str | None:
    """Reads the base model from the newest readable checkpoint of a run; None if there is no checkpoint, or no base
    model."""
    record = _read_newest(out)
    return None if record is None else record.caller.get("recipe", {}).get("base_model")


def count_recorded_phases(out: Path | None) -> int:
    """Counts the phases that are done in the newest readable checkpoint of a run; 0 if there is none."""
    record = None if out is None else _read_newest(out)
    return 0 if record is None else record.caller.get("progress", {}).get("phase", 0)


def _read_newest(out: Path) -> CheckpointRecord | None:
    """Reads the newest readable record of a run, or that of a checkpoint's folder itself; None if there is none."""
    for checkpoint in [out] if is_finished(out) else reversed(list_finished(out)):
        with suppress(UserError):
            return read_record(checkpoint)
    return None


@torch.no_grad()
def begin_with(model: PretrainingModel, state: RunState, origin: StoredModel, vocabulary: Vocabulary) -> str:
    """Copies the weights of a model into a new one, notes what they were trained on, and describes what is new.

    The embedding and the bias of a new piece are the means of those of the pieces that it replaces. New positions keep
    their random embeddings.
    """
    weights, fresh, shares = origin.read_weights(), model.state_dict(), model.shares
    state.trained_length, state.begun_positions = origin.trained, origin.known
    state.trained_segments = max(state.trained_segments, count_segments(weights, model.shape))
    new = origin.vocabulary.find_replaced(vocabulary.pieces[len(origin.vocabulary) :])
    for name in list_row_names(model.shape, "pieces"):
        if name in weights:
            rows = shares.find_whole_size(name, fresh[name])[0]
            weights[name] = extend_rows(weights[name], len(origin.vocabulary), new, rows)
    for name in list_row_names(model.shape, "positions"):
        weights[name] = torch.cat([weights[name], fresh[name][len(weights[name]) :]])
    known = {name: shares.take(name, weight) for name, weight in weights.items() if name in fresh}
    model.load_state_dict(fresh | known)
    called = {**list_heads(), **find_objective(model.shape).heads(model.shape)}
    anew = name_heads(fresh.keys() - weights.keys(), called)
    if model.shape.positions > origin.shape.positions and list_row_names(model.shape, "positions"):
        anew.append(f"positions {origin.shape.positions:,} to {model.shape.positions - 1:,}")
    if new:
        anew.append(f"{len(new):,} pieces, each the mean of those that it replaces")
    begins = f"begins with {origin.name}: {origin.shape.layers} layers of {origin.shape.hidden}"
    left = name_heads(weights.keys() - fresh.keys(), called)
    return "; ".join([f"{begins}, {len(origin.vocabulary):,} pieces", *describe_heads(anew, left)])


def extend_rows(rows: Tensor, known: int, new: list[list[int]], size: int) -> Tensor:
    """Returns the rows of the known pieces, then for each new piece the mean of those that it replaces, then zeros.

    A piece of characters that no known piece has replaces none: its row is the mean of all.
    """
    whole = torch.zeros(size, *rows.shape[1:])
    whole[:known] = rows[:known]
    for number, replaced in enumerate(new, known):
        whole[number] = rows[replaced or slice(known)].mean(0)
    return whole


def name_heads(names: set[str], called: Mapping[str, str]) -> list[str]:
    """Names the heads that weights of these names belong to."""
    found = {name.partition(".")[0] for name in names}
    assert found <= called.keys(), f"{found}: only whole heads may be missing or left over"
    return [called[name] for name in called if name in found]


def describe_change(before: Shape, now: Shape) -> str | None:
    """Describes in one line what becomes of a model in a phase with another objective; None if it stays as it is."""
    if before.learns.objective == now.learns.objective:
        return None
    ours, theirs = (find_objective(shape).heads(shape) for shape in (now, before))
    anew = [called for name, called in ours.items() if name not in theirs]
    left = [called for name, called in theirs.items() if name not in ours]
    return "; ".join([f"from here on the model {find_objective(now).learns}", *describe_heads(anew, left)])


def describe_heads(anew: list[str], left: list[str]) -> list[str]:
    """Describes which parts of a model are new and which are left out; empty if there are neither."""
    return [f"anew: {', '.join(anew)}"] * bool(anew) + [f"left out: {', '.join(left)}"] * bool(left)
