"""The model that a run begins with, and how its weights become those of a new model.

The recipe takes its sizes from there, and the data must have its pieces, in the same ids: weights mean nothing to other
pieces. More pieces may follow, and more positions; these begin anew.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.common.errors import DamageError, UserError
from data_prep.shards import Manifest
from data_prep.vocabulary.extension import pieces_replaced
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary
from pretraining.checkpoint.models import FoundModel, find_model_folder
from pretraining.checkpoint.record import finished_checkpoints, read_record
from pretraining.checkpoint.state import RunState
from pretraining.huggingface.folders import CONFIG, files_of_sentences, read_folder
from pretraining.huggingface.weights import PADDED, count_segments
from pretraining.model.bert import Bert
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import all_heads
from pretraining.processes.errors import SharedError

POSITIONS = "embeddings.position.weight"


class Origin(FoundModel):
    """A model to begin with, whose weights are not read yet."""

    @property
    def content(self) -> dict[str, Any]:
        """What must be the same on all ranks, which may find it on different disks."""
        commit = self.folder.name if self.on_hub else None
        sizes, pieces = asdict(self.shape), self.vocabulary.sha256
        return {"commit": commit, "sizes": sizes, "pieces": pieces, "trained": self.trained, "known": self.known}

    def check_data(self, data: Path, manifest: Manifest) -> Vocabulary:
        """Raises UserError unless the data has the pieces of this model in the same ids; returns the data's."""
        ours, theirs = read_vocabulary(data), self.vocabulary
        if ours.sha256 != manifest.vocabulary.sha256:
            raise DamageError(f"{data / VOCABULARY}: not what the data was made with; copy it again")
        if fault := self._difference(ours, theirs):
            raise UserError(f"--data {data}: {fault}; make the data with shard.py --vocab {self.name}")
        return ours

    def _difference(self, ours: Vocabulary, theirs: Vocabulary) -> str | None:
        """Says how the vocabulary of the data is no continuation of the model's."""
        if ours.cased != theirs.cased:
            cases = {True: "keeps case and accents", False: "puts text into lower case"}
            return f"the vocabulary of {self.name} {cases[theirs.cased]}, that of the data {cases[ours.cased]}"
        for number, (their, our) in enumerate(zip(theirs.pieces, ours.pieces, strict=False)):
            if their != our:
                return f"piece {number:,} is {their!r} in {self.name} and {our!r} in the data"
        if len(ours) < len(theirs):
            return f"{self.name} has {len(theirs):,} pieces, the data only the first {len(ours):,} of them"
        return None

    def read_weights(self) -> dict[str, Tensor]:
        """Reads the weights, by our names; those of whole heads may be missing."""
        return self.read_checkpoint() if self.is_checkpoint else read_folder(self.with_weights())[1]


class OriginFinder:
    """Finds the model that a recipe names, when the recipe asks for its sizes."""

    def __init__(self, out: Path | None, name: str | None = None) -> None:
        """`out` is the folder of the run: one that goes on needs its base model no more.

        All ranks make one together, before anything can fail on one of them: a model on the hub is fetched here, by
        the `name` that the recipe will ask for. What goes wrong is told when it does.
        """
        self._out = out
        self._found: Path | UserError | None = None
        if name and (out is None or recorded_shape(out) is None):
            try:
                self._found = find_model_folder(name)
            except SharedError:
                raise
            except UserError as error:
                self._found = error
        self.origin: Origin | None = None
        """the model that was found; None where none was asked for, or the run goes on"""

    def shape(self, name: str) -> Shape:
        """The sizes of the model, or of the run that began with it."""
        if self._out is not None and (shape := recorded_shape(self._out)) is not None:
            return shape
        if isinstance(self._found, UserError):
            raise self._found
        self.origin = Origin.open(name, self._found)
        return self.origin.shape


def recorded_shape(out: Path) -> Shape | None:
    """The sizes of the model that a run has in its checkpoints; None where it has none that can be read."""
    for checkpoint in reversed(finished_checkpoints(out)):
        with suppress(UserError):
            return read_record(checkpoint).shape
    return None


@torch.no_grad()
def begin_with(model: Bert, state: RunState, origin: Origin, vocabulary: Vocabulary) -> str:
    """Gives a fresh model the weights of another, notes what these were trained on, and says what begins anew.

    New pieces begin as the mean of the pieces that they replace, in the embeddings and in the decoder's bias. New
    positions stay as they were drawn.
    """
    weights, fresh = origin.read_weights(), model.state_dict()
    state.trained_length, state.begun_positions = origin.trained, origin.known
    state.trained_segments = max(state.trained_segments, count_segments(weights))
    new = pieces_replaced(origin.vocabulary, vocabulary.pieces[len(origin.vocabulary) :])
    for name in PADDED:
        if name in weights:
            weights[name] = extended(weights[name], len(origin.vocabulary), new, len(fresh[name]))
    positions = len(weights[POSITIONS])
    weights[POSITIONS] = torch.cat([weights[POSITIONS], fresh[POSITIONS][positions:]])
    known = {name: weight for name, weight in weights.items() if name in fresh}
    model.load_state_dict(fresh | known)
    anew = heads_of(fresh.keys() - weights.keys())
    if len(fresh[POSITIONS]) > positions:
        anew.append(f"positions {positions:,} to {len(fresh[POSITIONS]) - 1:,}")
    if new:
        anew.append(f"{len(new):,} pieces, each the mean of those that it replaces")
    return begins(origin, anew, heads_of(weights.keys() - fresh.keys()))


def extended(rows: Tensor, known: int, new: list[list[int]], size: int) -> Tensor:
    """The rows of the known pieces, then for each new piece the mean of those that it replaces, then zeros.

    A piece that replaces none, of characters that no piece has, begins as the mean of all.
    """
    whole = torch.zeros(size, *rows.shape[1:])
    whole[:known] = rows[:known]
    for number, replaced in enumerate(new, known):
        whole[number] = rows[replaced or slice(known)].mean(0)
    return whole


def heads_of(names: set[str]) -> list[str]:
    """The heads that weights of these names belong to, as they are called."""
    found, called = {name.partition(".")[0] for name in names}, all_heads()
    assert found <= called.keys(), f"{found}: only whole heads may be missing or left over"
    return [called[name] for name in called if name in found]


def begins(origin: Origin, anew: list[str], left: list[str]) -> str:
    """One line on what a run begins with."""
    shape, pieces = origin.shape, len(origin.vocabulary)
    if shape.vocabulary > pieces and (origin.folder / CONFIG).exists():
        left = [*left, f"{shape.vocabulary - pieces:,} rows of its embeddings that belong to no piece"]
    if files := files_of_sentences(origin.folder):
        left = [*left, f"{', '.join(files)}, for vectors of sentences"]
    parts = [f"begins with {origin.name}: {shape.layers} layers of {shape.hidden}, {pieces:,} pieces"]
    if origin.trained < origin.known:
        parts += [f"positions {origin.trained:,} to {origin.known - 1:,} as they are, though its tokenizer cuts before"]
    parts += [f"anew: {', '.join(anew)}"] * bool(anew) + [f"left out: {', '.join(left)}"] * bool(left)
    return "; ".join(parts)
