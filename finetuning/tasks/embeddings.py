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
from finetuning.tasks.sentences import SentenceItems, SentenceTask, format_predictions
from finetuning.tasks.task import PieceLengths, Seen
from pretraining.architectures.weights import TaskHead
from pretraining.scoring.retrieval import BEST, BLOCK, Ranking, compute_metrics

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_scores and self.train.labels is not None:
            self.notes += tuple(count_equal_texts(self.train.labels))

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
        """Describes the layout of text."""
        return {"kind": self.head.kind, "length": self.train.length}


def normalize(vectors: Array) -> Array:
    """Scales vectors (n, H) to the length 1; zeros stay so."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), TINY))


def _compare_vectors(outputs: Ragged, items: int) -> Array:
    """Computes the cosine of the first two vectors of each item."""
    vectors = normalize(outputs.values).reshape(items, -1, outputs.values.shape[1])
    return np.asarray((vectors[:, 0] * vectors[:, 1]).sum(1))


def _average(found: Mapping[str, Array], chosen: Array) -> dict[str, float]:
    return {name: float(values[chosen].mean()) for name, values in found.items()}


def read_texts(table: TextTable, fields: Sequence[str]) -> tuple[list[str], ...]:
    """Reads columns of texts, none of them empty."""
    texts = tuple(map(table.column, fields))
    for column, own in zip(fields, texts, strict=True):
        if (empty := next((row for row, text in enumerate(own) if not text.strip()), None)) is not None:
            table.fail(empty, f"{column} is empty: each text needs one that belongs to it; leave the row out")
    return texts


def number_texts(texts: Sequence[Sequence[str]]) -> Array:
    """Numbers the texts of items (n, c): equal texts have the same number."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(text, len(numbers)) for row in zip(*texts, strict=True) for text in row]
    return np.array(found, np.int64).reshape(-1, len(texts))


def count_equal_texts(numbers: Array) -> list[str]:
    """Makes a note on the rows of numbers of texts that have one in common with others."""
    shared = int((np.bincount(numbers.ravel())[numbers] > 1).any(1).sum())
    rule = "equal texts, and those of equal questions, are never negatives of each other"
    return [f"{shared:,} of {len(numbers):,} training rows have a text that occurs again: {rule}"] if shared else []


def rank_texts(labels: Array, vectors: Array) -> dict[str, Array]:
    """Computes the figures of each different question: how near to it its passages are, among all different passages.
    `labels` (n, c): numbers of texts, and their normalized `vectors` (n, c, H)."""
    asked, questions, of_items = np.unique(labels[:, 0], return_index=True, return_inverse=True)
    _, passages, places = np.unique(labels[:, 1:], return_index=True, return_inverse=True)
    grades: list[dict[int, int]] = [{} for _ in asked]
    for question, passage in zip(of_items.tolist(), places.reshape(len(labels), -1)[:, 0].tolist(), strict=True):
        grades[question][passage] = 1
    corpus = vectors[:, 1:].reshape(-1, vectors.shape[2])[passages]
    ranking = Ranking(len(asked), BEST, np.arange(len(corpus)))
    for first in range(0, len(corpus), BLOCK):
        ranking.add_block(vectors[questions, 0], corpus[first : first + BLOCK], first)
    found = compute_metrics(grades, ranking.rows)
    return {name: found[name.replace("@", "_")] for name in RANKED}
