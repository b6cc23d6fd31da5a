"""Scores a pre-trained model on shards: the figures of its objective, and bits per character of the predicted pieces.

A loss per piece depends on the vocabulary: longer pieces have higher losses. Bits per character compare models of
different vocabularies. Special pieces have no characters and do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from data_prep.common.errors import UserError, quote
from data_prep.settings import SHORTEST
from data_prep.shards import Manifest
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.checkpoint.models import StoredModel
from pretraining.data.batches import count_examples, validation_batches
from pretraining.data.corpora import Corpora, CorpusFolder
from pretraining.data.dataset import Dataset
from pretraining.model.batch import PretrainingBatch
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import COUNTS, Objective, build_model, find_objective
from pretraining.reporting.meter import round_sum

PIECES = 1 << 13
"""Maximum number of pieces of a batch, with padding."""
Split = Literal["validation", "train"]


@dataclass(frozen=True)
class ShardScores:
    """The scores of a model on the examples of a split of shards."""

    model: str
    data: str
    fingerprint: str
    """fingerprint of the shards"""
    split: Split
    length: int
    examples: int
    predictions: int
    """number of predicted pieces"""
    characters: int
    """characters of these pieces, without `##` and special pieces"""
    bits_per_character: float | None
    """without special pieces"""
    left_out: dict[str, int]
    """number of predictions of each special piece"""
    figures: dict[str, float]
    said: list[str]
    """the figures as lines for the console; empty if nothing was predicted"""
    notes: list[str]
    """reasons why something was not scored"""


def sum_losses(
    objective: Objective,
    shape: Shape,
    forward: Callable[[PretrainingBatch], Any],
    batches: Iterable[tuple[PretrainingBatch, bool]],
    device: torch.device,
    group: Any = None,
    same_bits: bool = False,
) -> dict[str, float]:
    """Adds up the sums of an objective and `COUNTS` over the batches that count, of all ranks if they are connected, or
    of a group that has them all; with `same_bits` their order does not matter. Waits for the GPU at the end only."""
    found = torch.zeros(len(objective.sums(shape)) + len(COUNTS), dtype=torch.float64, device=device)
    for batch, counts in batches:
        losses = forward(batch.to(device))
        sizes = torch.tensor([len(batch.labels), len(batch.lengths)], dtype=torch.float64)
        added = torch.stack([loss.double() for loss in losses])
        found += torch.cat([round_sum(added) if same_bits else added, sizes.to(device)]) * counts
    if dist.is_initialized():
        dist.all_reduce(found, group=group)
    return dict(zip((*objective.sums(shape), *COUNTS), found.tolist(), strict=True))


def score_shards(
    model: StoredModel, corpus: CorpusFolder, split: Split, length: int | None, limit: int | None, device: torch.device
) -> ShardScores:
    """Scores a model, in fp32, on the first `limit` examples of shards, or all, in one process."""
    folder, manifest = corpus.folder, corpus.manifest
    require_vocabulary(manifest, model, folder)
    network = model.build_pretrained()
    trained = model.trained or network.shape.positions
    length, most = length or choose_length(manifest, trained), network.shape.positions
    if not SHORTEST <= length <= most:
        raise UserError(f"--length {length}: {model.name} has {most} positions; take {SHORTEST} to {most}")
    network, notes = fit_to_data(network, manifest, folder)
    if length > trained:
        notes.append(f"length {length} is more than {model.name} was trained on, {trained} pieces")
    network = network.float().to(device).eval()
    objective = find_objective(network.shape)
    dataset = Dataset(Corpora((corpus,)), length, split == "validation", objective=objective)
    bits = Bits(network, objective, model.vocabulary)
    batches = validation_batches(dataset, 0, 1, max(1, PIECES // length), limit)
    with torch.inference_mode():
        totals = sum_losses(objective, network.shape, bits.forward, batches, device)
    figures = objective.score(objective.measure(totals)) if totals["predictions"] else {}
    if not figures:
        notes.append("these examples have no piece to predict, so nothing is scored; take more of them, or longer ones")
    return ShardScores(
        model=model.name,
        data=str(folder),
        fingerprint=manifest.fingerprint,
        split=split,
        length=length,
        examples=count_examples(dataset, limit),
        predictions=int(totals["predictions"]),
        characters=bits.characters,
        bits_per_character=bits.count_per_character(totals),
        left_out=bits.left_out,
        figures=figures,
        said=objective.describe_figures(figures) if figures else [],
        notes=notes,
    )


def require_vocabulary(manifest: Manifest, model: StoredModel, folder: Path) -> None:
    """Raises UserError for shards of another vocabulary."""
    if manifest.vocabulary.sha256 != model.vocabulary.sha256:
        raise UserError(
            f"--data {folder}: has another vocabulary than {model.name}, for which the same numbers are other pieces; "
            f"make shards of its own with data_prep/shard.py --vocab {quote(model.name)}"
        )


def choose_length(manifest: Manifest, trained: int) -> int:
    """Chooses the longest length of the shards that the model was trained on; if none, the trained length."""
    lengths = manifest.lengths()
    return max([length for length in lengths if length <= trained], default=max(trained, SHORTEST))


def fit_to_data(model: PretrainingModel, manifest: Manifest, folder: Path) -> tuple[PretrainingModel, list[str]]:
    """Returns the model without heads that this data cannot score, and lines on them."""
    shape, objective = model.shape, find_objective(model.shape)
    if not shape.learns.pairs or manifest.has_pairs:
        return model, []
    without = build_model(shape.change_learning(pairs=False))
    wanted = without.state_dict().keys()
    without.load_state_dict({name: weight for name, weight in model.state_dict().items() if name in wanted})
    return without, [f"{folder} has no pairs: {objective.pairs_head} is not scored"]


class Bits:
    """Measures bits per character while a model scores batches, without special pieces, whose losses are computed once
    more from the same states."""

    def __init__(self, model: PretrainingModel, objective: Objective, vocabulary: Vocabulary) -> None:
        self._model, self._objective = model, objective
        self._letters, self._special = np.array([*map(len, vocabulary.texts)]), vocabulary.special
        self._names = vocabulary.special_pieces
        self._times = np.zeros(len(vocabulary), np.int64)
        self._nats = torch.zeros((), dtype=torch.float64)

    def forward(self, batch: PretrainingBatch) -> Any:
        """Computes the sums of the objective for a batch, and the losses of its special pieces, if it predicts any."""
        self._times += np.bincount(batch.labels.cpu().numpy(), minlength=len(self._times))
        if (name := self._objective.sum_of_pieces) is None:
            return self._model(batch)
        seen = self._model.states_for_heads(batch)
        special = torch.isin(batch.labels, torch.tensor(self._special, device=batch.labels.device))
        of_pieces, others = seen.tensor_split([len(batch.chosen)])
        seen_special = torch.cat([of_pieces[special], others])
        of_special = replace(batch, chosen=batch.chosen[special], labels=batch.labels[special])
        nats = getattr(self._objective.losses(self._model, seen_special, of_special), name)
        self._nats = self._nats.to(nats.device) + nats.double()
        return self._objective.losses(self._model, seen, batch)

    @property
    def characters(self) -> int:
        """Number of characters of all predicted pieces."""
        return int((self._letters * self._times).sum())

    @property
    def left_out(self) -> dict[str, int]:
        """Number of predictions of each special piece, if any."""
        times = self._times[list(self._special)].tolist()
        return {piece: count for piece, count in zip(self._names, times, strict=True) if count}

    def count_per_character(self, totals: Mapping[str, float]) -> float | None:
        """Computes bits per character from the totals of the objective; None without characters."""
        if self._objective.sum_of_pieces is None or not self.characters:
            return None
        return (totals[self._objective.sum_of_pieces] - float(self._nats)) / math.log(2) / self.characters
