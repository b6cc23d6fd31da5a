"""Finds a stored model: a folder of transformers, a run, a checkpoint, or a name on the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.common.hub import fetch_model, find_folder
from data_prep.vocabulary.source import FILES
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.architectures.declaration import find_architecture
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.reading import find_fault, list_parameter_sizes, read_weights_together
from pretraining.checkpoint.record import AVERAGED, EXPORT, RECORD, TOKENIZER, WEIGHT, find_checkpoint, list_finished
from pretraining.checkpoint.state import Saved
from pretraining.huggingface import folders
from pretraining.huggingface.folders import CARD, CONFIG
from pretraining.huggingface.model_card import BaseSummary, read_front_matter
from pretraining.huggingface.pooling import MODULES
from pretraining.huggingface.weights import check_finite, count_segments, list_row_names, list_weights, repeat_segment
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import PIECE_HEAD, Sees, Shape
from pretraining.objectives.declaration import build_model, choose_way, find_objective
from pretraining.processes.group import gather, place

SHOWN = 10
"""Number of added pieces that a model card lists."""
PARTS = "*-of-*"
"""Pattern for the numbers in the names of weight files in parts."""


@dataclass(frozen=True)
class StoredModel:
    """A stored model. Its weights are read on demand, by all ranks together."""

    name: str
    """its name as the user gave it"""
    folder: Path
    """its folder of transformers, or its checkpoint"""
    shape: Shape
    """sizes of its encoder, with exactly one row of embeddings for each piece"""
    rows: int
    """rows of its stored embeddings; the last may belong to no piece"""
    vocabulary: Vocabulary
    """its vocabulary"""
    trained: int
    """longest text that it was trained on, as far as known"""
    known: int
    """positions with trained embeddings: of a run those that were trained, otherwise all"""
    on_hub: bool
    from_hub: str | None = None
    """model on the hub that it was made from, if known"""
    licence: str | None = None
    """its licence, if its card or recipe names one"""
    sees: Sees | None = None
    """the way in which it is to read; None for that of its objective"""

    @classmethod
    def open(cls, name: str, found: Path | None = None, sees: Sees | None = None) -> StoredModel:
        """Reads all of a model but its weights. `name` is a folder, a run, a checkpoint or a name on the hub.

        `found` is its folder if it was found before; otherwise all ranks call this together. `sees`: as the field;
        raises UserError if the model has not learned it.
        """
        folder, on_hub = found or find_model_folder(name), not Path(name).exists()
        if (folder / CONFIG).is_file() or (folder / MODULES).is_file() or on_hub:
            shape = folders.read_shape(folder)
            vocabulary = folders.read_pieces(folder, shape, name)
            trained, known = folders.read_length(folder, shape), shape.positions
            from_hub, licence = (read_front_matter(folder / CARD, key) for key in ("base_model", "license"))
        else:
            if not (list_finished(folder) or (folder / RECORD).exists()):
                raise UserError(
                    f"{folder}: no {CONFIG} and no finished checkpoint: not a folder of transformers, not a run"
                )
            folder = find_checkpoint(folder)
            saved = Saved.read(folder)
            shape, vocabulary, run = saved.record.shape, saved.read_vocabulary(), saved.run
            from_hub, licence = run.base.hub_model if run.base else None, run.recipe.card.licence
            trained, known = (min(n, shape.positions) for n in (run.state.trained_length, run.state.known_positions))
        fitted = find_architecture(shape.architecture).fit_vocabulary(shape, vocabulary.special)
        encoder = replace(choose_way(fitted, sees, name).encoder, vocabulary=len(vocabulary))
        return cls(name, folder, encoder, shape.vocabulary, vocabulary, trained, known, on_hub, from_hub, licence, sees)

    @property
    def is_checkpoint(self) -> bool:
        """Whether the weights are in a checkpoint rather than in a folder of transformers."""
        return not (self.folder / CONFIG).exists()

    @property
    def identity(self) -> tuple[object, ...]:
        """Facts that must be the same on all ranks, which may find the model on different disks."""
        commit = self.folder.name if self.on_hub else None
        return commit, self.shape, self.rows, self.vocabulary.sha256, self.trained, self.known

    @cached_property
    def head(self) -> TaskHead | None:
        """The head that it was fine-tuned with; None if it was not fine-tuned."""
        return None if self.is_checkpoint else folders.read_head(self.folder)

    def summary(self, vocabulary: Vocabulary | None = None) -> BaseSummary:
        """Summarises it for the card of a model that began with it. Checkpoints and exports have the name of their run.

        `vocabulary` is the vocabulary of that model, which may have more pieces.
        """
        added = [] if vocabulary is None else vocabulary.pieces[len(self.vocabulary) :]
        name, folder = self.name, self.folder.resolve()
        if not self.on_hub:
            if (folder / RECORD).exists():
                folder = folder.parents[1]
            elif folder.name in (EXPORT, AVERAGED) and (folder.parent / TOKENIZER).is_dir():
                named = f"-{AVERAGED}" * (folder.name == AVERAGED)
                folder = folder.with_name(f"{folder.parent.name}{named}")
            name = folder.name
        from_hub = None if self.on_hub else self.from_hub
        return BaseSummary(name, self.on_hub, from_hub, self.licence, len(added), added[:SHOWN])

    def read_weights(self) -> dict[str, Tensor]:
        """Reads all weights, by our names; whole heads may be missing."""
        if not self.is_checkpoint:
            return folders.read_folder(self.fetch_weights())[1]
        gather(None, find_fault(self.folder, *place(), f"{WEIGHT}-"))
        saved = Saved.read(self.folder)
        weights = read_weights_together(self.folder, list_parameter_sizes(saved.record.shape))
        check_finite(str(self.folder), weights)
        return repeat_segment(weights, saved.record.shape) if saved.run.state.trained_segments == 1 else weights

    def build_pretrained(self, predicts: bool = False) -> PretrainingModel:
        """Builds the model with its pre-training heads; raises UserError if one is missing, or if it `predicts` pieces
        and its objective does not."""
        cure = "name the run of its pre-training"
        if self.head is not None:
            raise UserError(f"{self.name}: was fine-tuned, so it says of no piece how likely it is: {cure}")
        if self.is_checkpoint:
            shape, weights = Saved.read(self.folder).record.shape, self.read_weights()
        else:
            shape, weights, _ = folders.read_folder(self.fetch_weights())
        if predicts:
            require_pieces(shape, self.name)
        model = build_model(choose_way(shape, self.sees, self.name))
        if lacking := model.state_dict().keys() - weights.keys():
            heads = ", ".join(sorted({name.partition(".")[0] for name in lacking}))
            raise UserError(f"{self.name}: has no {heads}, with which it was pre-trained: {cure}")
        model.load_state_dict({name: weights[name] for name in model.state_dict()})  # read one way it has no pooler
        return model.eval()

    @cached_property
    def encoder(self) -> dict[str, Tensor]:
        """The weights of the encoder, and of the pooler if there is a trained one: also one that is part of another
        head, as in transformers."""
        if not self.is_checkpoint:
            return cut_rows(self.shape, folders.read_encoder(self.fetch_weights())[1])
        weights = self.read_weights()
        kept = list_weights(self.shape, "none")
        if count_segments(weights, self.shape) == 1 < self.shape.segments:  # without pairs, which train the pooler
            kept = find_architecture(self.shape.architecture).weights(self.shape)
        shared = {weight.theirs: weight.ours for weight in list_weights(Saved.read(self.folder).record.shape)}
        sources = {weight.ours: shared.get(weight.theirs, weight.ours) for weight in kept}
        return cut_rows(self.shape, {ours: weights[name] for ours, name in sources.items() if name in weights})

    @cached_property
    def language_head(self) -> dict[str, Tensor]:
        """The weights of the head that predicts pieces, by our names; empty if there is none, as after fine-tuning."""
        if self.head is not None:
            return {}
        return cut_rows(
            self.shape,
            {name: weight for name, weight in self.read_weights().items() if name.startswith(f"{PIECE_HEAD}.")},
        )

    def fetch_weights(self) -> Path:
        """Returns its folder of transformers, after fetching the weights of the same commit if it is on the hub:
        safetensors, or the older format of PyTorch."""
        for whole in (folders.WEIGHTS, folders.OLD_WEIGHTS) if self.on_hub else ():
            stem, _, end = whole.rpartition(".")
            files = [CONFIG, whole, f"{whole}{folders.INDEX}", f"{stem}{PARTS}.{end}"]
            found = fetch_together(self.name, files, self.folder.name)
            if any((found / file).exists() for file in (whole, f"{whole}{folders.INDEX}")):
                return found
        return self.folder


def cut_rows(shape: Shape, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cuts the embeddings, and the bias that goes with them, to the vocabulary of a shape."""
    for name in list_row_names(shape, "pieces"):
        if name in weights:
            rows = torch.zeros(shape.padded_vocabulary, *weights[name].shape[1:])
            rows[: shape.vocabulary] = weights[name][: shape.vocabulary]
            weights = {**weights, name: rows}
    return weights


def require_pieces(shape: Shape, name: str) -> None:
    """Raises UserError for a model that predicts no pieces."""
    objective = find_objective(shape)
    if PIECE_HEAD not in objective.heads(shape):
        cure = "name a model that predicts pieces"
        raise UserError(f"{name}: {objective.learns}, so it says of no piece how likely it is; {cure}")


def find_model_folder(name: str) -> Path:
    """Finds the folder of a model, here or on the hub. All ranks call it together."""
    if any(there := gather(Path(name).exists())) and not all(there):
        raise UserError(f"{name}: no such folder on some machines; ranks that lack it: {there.count(False)}")
    return find_folder(name, [CONFIG, CARD, *FILES], fetch_together)


def fetch_together(name: str, files: Sequence[str], revision: str | None = None) -> Path:
    """Fetches files of a model as `fetch_model` does; if ranks are connected, all of them call it together.

    Rank 0 finds the commit, then the first rank of every other machine fetches the same; the other ranks read the
    cache. So each machine asks the hub once. An error is raised on all ranks.
    """
    if not dist.is_initialized():
        return fetch_model(name, files, revision)
    rank, is_first_here = dist.get_rank(), os.environ.get("LOCAL_RANK") == "0"
    for is_mine in (rank == 0, rank > 0 and is_first_here):
        fault = None
        if is_mine:
            try:
                revision = fetch_model(name, files, revision).name
            except UserError as error:
                fault = str(error)
        found = gather((revision, fault))
        if faults := [fault for _, fault in found if fault]:
            raise UserError(faults[0])  # not of this rank alone, and yet the recipe may have others to tell with it
        revision = found[0][0]
    return fetch_model(name, files, revision, from_cache=True)
