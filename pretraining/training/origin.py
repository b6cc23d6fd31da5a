"""The model that a run begins with: where it is, what it is, and how its weights become those of a new model.

It is a folder of transformers, a run, a checkpoint, or a name on the Hugging Face hub. The recipe takes its sizes from
there, and the data must have its pieces, in the same ids: weights mean nothing to other pieces. More pieces may follow,
and more positions; these begin anew.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.common.errors import DamageError, UserError
from data_prep.common.hub import find_folder
from data_prep.shards import Manifest
from data_prep.vocabulary.extension import pieces_replaced
from data_prep.vocabulary.source import FILES, read_vocabulary
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary
from pretraining.checkpoint.reading import parameter_sizes, read_weights, require_whole_weights
from pretraining.checkpoint.record import RECORD, TOKENIZER, find_checkpoint, finished_checkpoints, read_record
from pretraining.huggingface.folders import (
    CARD,
    CONFIG,
    INDEX,
    OLD_WEIGHTS,
    WEIGHTS,
    read_folder,
    read_length,
    read_shape,
)
from pretraining.huggingface.model_card import BaseSummary, read_base_model
from pretraining.huggingface.weights import PADDED, count_segments, with_first_segment_alone
from pretraining.model.bert import Bert
from pretraining.model.shape import Shape
from pretraining.processes.group import SharedError, gather
from pretraining.training.exporting import EXPORT
from pretraining.training.hub import fetch_together
from pretraining.training.state import RunRecord, RunState

CALLED = {"pooler": "pooler", "masked_head": "masked head", "next_head": "next-sentence head"}
"""How our names of the weights of heads begin, and what the heads are called."""
POSITIONS = "embeddings.position.weight"
PARTS = "*-of-*"
"""Files of weights in parts, between the name of the whole and its ending."""


@dataclass(frozen=True)
class Origin:
    """A model to begin with, whose weights are not read yet."""

    name: str
    """as the recipe or the command names it"""
    folder: Path
    """a folder of transformers, or a checkpoint"""
    shape: Shape
    """its sizes; of its vocabulary, the rows, of which the last may belong to no piece"""
    vocabulary: Vocabulary
    trained: int
    """the longest text that it was trained on, as far as that is known"""
    known: int
    """positions whose embeddings are worth keeping: of a run those that were trained, otherwise all"""
    on_hub: bool
    from_hub: str | None = None
    """the model on the hub that it was made from itself, where that is known"""

    def summary(self) -> BaseSummary:
        """What a run keeps of it; a checkpoint and an export are called as their run."""
        if self.on_hub:
            return BaseSummary(self.name, on_hub=True)
        folder = self.folder.resolve()
        if (folder / RECORD).exists():
            folder = folder.parents[1]
        elif folder.name == EXPORT and (folder.parent / TOKENIZER).is_dir():
            folder = folder.parent
        return BaseSummary(folder.name, on_hub=False, from_hub=self.from_hub)

    @property
    def content(self) -> dict[str, Any]:
        """What must be the same on all ranks, which may find it on different disks."""
        commit = self.folder.name if self.on_hub else None
        sizes, pieces = asdict(self.shape), self.vocabulary.sha256
        return {"commit": commit, "sizes": sizes, "pieces": pieces, "trained": self.trained, "known": self.known}

    def check_data(self, data: Path, manifest: Manifest) -> Vocabulary:
        """Raises UserError unless the data has the pieces of this model in the same ids; returns the data's."""
        ours, theirs = read_vocabulary(data), self.vocabulary
        if ours.sha256 != manifest.content["vocabulary"]["sha256"]:
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
        if not (self.folder / CONFIG).exists():
            require_whole_weights(self.folder)
            record = read_record(self.folder)
            weights = read_weights(self.folder, parameter_sizes(record.shape))
            alone = RunRecord.of(record).state.trained_segments == 1
            return with_first_segment_alone(weights) if alone else weights
        folder = fetch_weights(self.name, self.folder) if self.on_hub else self.folder
        return read_folder(folder)[1]


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
                self._found = find_model(name)
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
        self.origin = find_origin(name, self._found)
        return self.origin.shape


def recorded_shape(out: Path) -> Shape | None:
    """The sizes of the model that a run has in its checkpoints; None where it has none that can be read."""
    for checkpoint in reversed(finished_checkpoints(out)):
        with suppress(UserError):
            return read_record(checkpoint).shape
    return None


def find_model(name: str) -> Path:
    """The folder of a model that is there, or was fetched from the hub. All ranks call it together."""
    if dist.is_initialized() and any(there := gather(Path(name).exists())) and not all(there):
        raise UserError(f"{name}: no such folder on some machines; ranks that lack it: {there.count(False)}")
    return find_folder(name, [CONFIG, *FILES], fetch_together)


def find_origin(name: str, found: Path | None = None) -> Origin:
    """Reads all of a model but its weights: one of this folder, run, checkpoint or name on the hub, found already."""
    folder, on_hub = found or find_model(name), not Path(name).exists()
    if (folder / CONFIG).is_file() or on_hub:
        shape, vocabulary = read_shape(folder), read_vocabulary(folder)
        trained, known = read_length(folder, shape), shape.positions
        from_hub = read_base_model(folder / CARD)
    else:
        if not (finished_checkpoints(folder) or (folder / RECORD).exists()):
            raise UserError(
                f"{folder}: no {CONFIG} and no finished checkpoint: not a folder of transformers, not a run"
            )
        folder = find_checkpoint(folder)
        record = read_record(folder)
        shape, vocabulary, run = record.shape, read_vocabulary(folder), RunRecord.of(record)
        if vocabulary.sha256 != run.data.vocabulary:
            raise UserError(f"{folder}: the vocabulary of its run is not the one that it was trained with")
        from_hub = run.base.hub_model if run.base else None
        trained, known = (min(n, shape.positions) for n in (run.state.trained_length, run.state.known_positions))
    if len(vocabulary) > shape.vocabulary:
        raise UserError(f"{name}: {len(vocabulary):,} pieces, but the model has only {shape.vocabulary:,}")
    return Origin(name, folder, shape, vocabulary, trained, known, on_hub, from_hub)


def fetch_weights(name: str, folder: Path) -> Path:
    """Fetches the weights of a model on the hub, of the same commit: safetensors, or what PyTorch wrote before."""
    for whole in (WEIGHTS, OLD_WEIGHTS):
        stem, _, end = whole.rpartition(".")
        found = fetch_together(name, [CONFIG, whole, f"{whole}{INDEX}", f"{stem}{PARTS}.{end}"], folder.name)
        if any((found / file).exists() for file in (whole, f"{whole}{INDEX}")):
            return found
    return folder


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
    found = {name.partition(".")[0] for name in names}
    assert found <= CALLED.keys(), f"{found}: only whole heads may be missing or left over"
    return [called for name, called in CALLED.items() if name in found]


def begins(origin: Origin, anew: list[str], left: list[str]) -> str:
    """One line on what a run begins with."""
    shape, pieces = origin.shape, len(origin.vocabulary)
    if shape.vocabulary > pieces and (origin.folder / CONFIG).exists():
        left = [*left, f"{shape.vocabulary - pieces:,} rows of its embeddings that belong to no piece"]
    parts = [f"begins with {origin.name}: {shape.layers} layers of {shape.hidden}, {pieces:,} pieces"]
    if origin.trained < origin.known:
        parts += [f"positions {origin.trained:,} to {origin.known - 1:,} as they are, though its tokenizer cuts before"]
    parts += [f"anew: {', '.join(anew)}"] * bool(anew) + [f"left out: {', '.join(left)}"] * bool(left)
    return "; ".join(parts)
