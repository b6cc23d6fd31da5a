"""Vectors of texts: questions with the passages that belong to them, perhaps with some that do not, or pairs of texts
with a score of their likeness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.files import replacing
from data_prep.readers.tables import TextTable
from finetuning.inputs import Encoded, Ragged
from finetuning.results import Figures, name_predictions_file
from finetuning.tasks.scores import Certainty, bootstrap_spreads
from finetuning.tasks.sentences import SentenceItems, SentenceTask, format_predictions, read_scores
from finetuning.tasks.task import PieceLengths, Seen, Setup
from pretraining.architectures.weights import TaskHead

SCORED, RANKED = ("spearman", "pearson"), ("mrr@10", "ndcg@10", "recall@100")
"""The figures of pairs with scores, and of questions with passages, the default first."""
TINY = 1e-12
SIMILAR = 1e-4
"""A model whose vectors differ by less, in each of their values, gives all texts the same one."""


@dataclass(frozen=True)
class EmbeddingItems(SentenceItems):
    """Texts that belong together, each of them a sequence of its own."""

    def encode(self, numbers: Array) -> Encoded:
        """Cuts the texts of these items into pieces."""
        count = len(self.texts)
        rows = [column[number] for number in numbers.tolist() for column in self.texts]
        sequences = self.cutter.lay_out(self.cutter.cut_texts(rows), None, self.length)
        labels = None if self.labels is None else Ragged.from_table(self.labels[numbers])
        return Encoded(sequences, labels, choices=count)


@dataclass
class EmbeddingTask(SentenceTask):
    """A task of vectors. Without scores, its labels are numbers of texts, equal for equal texts."""

    widths: tuple[int, ...] = ()
    """The Matryoshka widths, of which a user of the model may choose."""

    @property
    def has_scores(self) -> bool:
        """Whether pairs have scores; otherwise a question and its passage belong together."""
        return self.metrics == SCORED

    def describe_split(self, split: str) -> Seen:
        """Describes the items of a split."""
        items = self.items.get(split, self.train)
        assert items.labels is not None
        answers = [row.tobytes() for row in items.labels] if self.has_scores else [b""] * len(items)
        return Seen(items.texts, answers, (PieceLengths("texts", "length", items.length, items.measure_whole),))

    def score(self, split: str, outputs: Ragged) -> Figures:
        """Computes the figures of a split of `dev`."""
        if self.has_scores:
            return super().score(split, outputs)
        return {name: float(values.mean()) for name, values in self._rank_passages(split, outputs).items()}

    def estimate_certainty(self, split: str, outputs: Ragged) -> Certainty:
        """Bootstraps pairs, or questions."""
        if self.has_scores:
            return super().estimate_certainty(split, outputs)
        found = self._rank_passages(split, outputs)
        items = len(found[self.metric])
        compute = partial(_average, found)
        return Certainty(items, bootstrap_spreads(items, compute))

    def _compare_answers(self, split: str, outputs: Ragged) -> tuple[Array, Array]:
        """Returns the scores of pairs, and the cosines of their vectors."""
        items = self.dev[split]
        assert items.labels is not None
        return items.labels[:, 0], _compare_vectors(outputs, len(items))

    def _rank_passages(self, split: str, outputs: Ragged) -> dict[str, Array]:
        """Computes the figures of each question of a split: how near to it its passages are, among those of all items,
        also those that do not belong to their questions."""
        labels = self.dev[split].labels
        assert labels is not None
        return rank_texts(labels, normalize(outputs.values).reshape(*labels.shape, -1))

    def is_degenerate(self, split: str, outputs: Ragged) -> bool:  # noqa: ARG002
        """Tells whether a model gives every text the same vector."""
        return bool(np.ptp(normalize(outputs.values), axis=0).max() < SIMILAR)

    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        """Writes a line for every item: its number, and the cosine of the vectors of its first two texts."""
        cosines = _compare_vectors(outputs, len(self.items[split]))
        with replacing(name_predictions_file(folder, split, ".tsv")) as file:
            file.write(format_predictions(TaskHead("score"), cosines[:, None]))

    def describe_use(self, outputs: Ragged) -> dict[str, Any]:  # noqa: ARG002
        """Describes the layout of text, and the widths of vectors."""
        return {"kind": self.head.kind, "length": self.train.length, "widths": list(self.widths)}


def normalize(vectors: Array) -> Array:
    """Scales vectors (n, H) to the length 1; zeros stay so."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), TINY))


def _compare_vectors(outputs: Ragged, items: int) -> Array:
    """Computes the cosine of the first two vectors of each item."""
    vectors = normalize(outputs.values).reshape(items, -1, outputs.values.shape[1])
    return np.einsum("nh,nh->n", vectors[:, 0], vectors[:, 1])


def _average(found: Mapping[str, Array], chosen: Array) -> dict[str, float]:
    return {name: float(values[chosen].mean()) for name, values in found.items()}


def read_items(
    tables: Mapping[str, TextTable], fields: Sequence[str], label: str, setup: Setup
) -> tuple[dict[str, EmbeddingItems], tuple[str, ...]]:
    """Reads the items of each split, and the figures, the default first. `fields`: columns of texts; `label`: the
    column of scores, empty for none."""
    items = {}
    for split, table in tables.items():
        texts = tuple(map(table.column, fields))
        for column, own in zip(fields, texts, strict=True):
            if (empty := next((row for row, text in enumerate(own) if not text.strip()), None)) is not None:
                table.fail(empty, f"{column} is empty: each text needs one that belongs to it; leave the row out")
        labels = read_scores(table, label) if label else number_texts(texts)
        items[split] = EmbeddingItems(setup.cutter, setup.settings.length, texts, labels)
    return items, SCORED if label else RANKED


def number_texts(texts: Sequence[Sequence[str]]) -> Array:
    """Numbers the texts of items (n, c): equal texts have the same number."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(text, len(numbers)) for row in zip(*texts, strict=True) for text in row]
    return np.array(found, np.int64).reshape(-1, len(texts))


def count_equal_texts(items: EmbeddingItems) -> list[str]:
    """Makes a note on the items that have a text in common with others."""
    assert items.labels is not None
    counts = np.bincount(items.labels.ravel())
    shared = int((counts[items.labels] > 1).any(1).sum())
    rule = "equal texts, and those of equal questions, are never negatives of each other"
    return [f"{shared:,} of {len(items):,} training rows have a text that occurs again: {rule}"] if shared else []


def rank_texts(labels: Array, vectors: Array) -> dict[str, Array]:
    known, first = np.unique(labels[:, 1:], return_index=True)
    corpus = vectors[:, 1:].reshape(-1, vectors.shape[2])[first]
    asked, index = np.unique(labels[:, 0], return_index=True)
    scores = vectors[index, 0] @ corpus.T
    found: dict[str, list[float]] = {name: [] for name in RANKED}
    for row, text in zip(scores, asked, strict=True):
        right = np.isin(known, labels[labels[:, 0] == text, 1])
        hits = np.flatnonzero(right[np.argsort(-row, kind="stable")])
        gains = 1 / np.log2(np.arange(10) + 2)
        found["mrr@10"].append(1 / (hits[0] + 1) if hits[0] < 10 else 0.0)
        found["ndcg@10"].append(gains[hits[hits < 10]].sum() / gains[: len(hits)].sum())
        found["recall@100"].append((hits < 100).mean())
    return {name: np.array(values) for name, values in found.items()}
