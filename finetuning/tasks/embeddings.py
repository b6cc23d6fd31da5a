"""Vectors of texts: questions with the passages that belong to them, perhaps with some that do not, or pairs of texts
with a score of their likeness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.readers.tables import TextTable
from finetuning.inputs import Encoded, Ragged
from finetuning.results import Figures, name_predictions_file
from finetuning.tasks.scores import METRICS, Certainty, bootstrap_spreads
from finetuning.tasks.sentences import SentenceItems, SentenceTask, format_predictions
from pretraining.architectures.weights import TaskHead
from pretraining.scoring.retrieval import BEST, Ranking, compute_metrics, normalize_vectors

SCORED, RANKED = ("spearman", "pearson"), ("mrr@10", "ndcg@10", "recall@100")
"""The figures of pairs with scores, and of questions with passages, the default first."""
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
    """Matryoshka dimensions: the first values of the vectors, which are scored alone too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for split, items in {"train": self.train, **self.dev}.items():
            assert items.labels is not None
            require_contrast(f"{self.name}: {split}", items.labels)
        if self.metrics != SCORED:
            self.notes += tuple(list_equal_texts(self.train, self.dev))

    def score(self, split: str, outputs: Ragged) -> Figures:
        """Computes the figures of a split of `dev`."""
        count, compute = self._prepare_figures(split, outputs)
        return compute(np.arange(count))

    def estimate_certainty(self, split: str, outputs: Ragged) -> Certainty:
        """Bootstraps pairs, or questions."""
        count, compute = self._prepare_figures(split, outputs)
        return Certainty(count, bootstrap_spreads(count, compute))

    def _prepare_figures(self, split: str, outputs: Ragged) -> tuple[int, Callable[[Array], Figures]]:
        """Counts the pairs with scores, or the questions, of a split; returns also what computes the figures of some of
        them. Questions are to find their passages among those of all items, also those that belong to none."""
        labels = self.dev[split].labels
        assert labels is not None
        found: dict[str, tuple[Callable[..., float], tuple[Array, ...]]] = {}
        for width in (None, *self.widths):
            vectors = normalize_vectors(outputs.values[:, :width], False, f"{split}: text", range(len(outputs.values)))
            vectors = vectors.reshape(len(labels), len(self.fields), -1)
            ranks = {} if self.metrics == SCORED else rank_texts(labels, vectors)
            columns = labels[:, 0], compute_cosines(vectors)
            for name in self.metrics if width is None else (self.metric,):
                each = (np.mean, (ranks[name],)) if ranks else (METRICS["embeddings"][name], columns)
                found[name if width is None else f"{name}_{width}"] = each

        def compute(chosen: Array) -> Figures:
            return {name: float(of(*(each[chosen] for each in values))) for name, (of, values) in found.items()}

        return len(found[self.metric][1][0]), compute

    def is_degenerate(self, split: str, outputs: Ragged) -> bool:  # noqa: ARG002
        """Tells whether a model gives every text the same vector."""
        return bool(np.ptp(outputs.values, axis=0).max() < SIMILAR)

    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        """Writes a line for every item: its number, and the cosine of the vectors of its first two texts."""
        vectors = outputs.values.reshape(len(self.items[split]), len(self.fields), -1)
        with replacing(name_predictions_file(folder, split, ".tsv")) as file:
            file.write(format_predictions(TaskHead("score"), compute_cosines(vectors)[:, None]))

    def describe_use(self, outputs: Ragged) -> dict[str, Any]:  # noqa: ARG002
        """Describes the layout of text and of vectors."""
        return {"kind": self.head.kind, "length": self.train.length, "widths": list(self.widths)}


def compute_cosines(vectors: Array) -> Array:
    """Computes the cosine of the first two vectors of each item, of normalized ones (n, c, H)."""
    return np.asarray((vectors[:, 0] * vectors[:, 1]).sum(1))


def read_full_column(table: TextTable, field: str) -> list[str]:
    """Reads a column of texts none of which is empty."""
    return table.read_texts(field, f"{field} is empty: each text needs one that belongs to it; leave the row out")


def number_texts(texts: Sequence[Sequence[str]]) -> Array:
    """Numbers the texts of items (n, c): equal texts have the same number."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(text, len(numbers)) for row in zip(*texts, strict=True) for text in row]
    return np.array(found, np.int64).reshape(-1, len(texts))


def require_contrast(where: str, labels: Array) -> None:
    """Raises UserError where all scores are equal, or no passage is wrong for a question: nothing can be learned."""
    firsts, others = len(np.unique(labels[:, 0])), len(np.unique(labels[:, 1:]))
    if labels.shape[1] == 1 and firsts < 2:
        raise UserError(f"{where}: all scores are equal, so there is nothing to learn")
    if labels.shape[1] > 1 and (others < 2 or (firsts < 2 and labels.shape[1] == 2)):
        raise UserError(f"{where}: no passage is wrong for a question; add rows with other texts")


def list_equal_texts(train: SentenceItems, dev: Mapping[str, SentenceItems]) -> Iterator[str]:
    """Yields notes on the training items with a text that occurs again, there or in a split of `dev`."""
    numbers = train.labels
    assert numbers is not None
    if shared := int((np.bincount(numbers.ravel())[numbers] > 1).any(1).sum()):
        rule = "equal texts, and those of equal questions, are never negatives of each other"
        yield f"{shared:,} of {len(numbers):,} training rows have a text that occurs again: {rule}"
    for split, items in dev.items():
        if items is not train and (known := len({*items.texts[1]} & {*train.texts[1]})):
            yield f"passages of {split} that occur in train, which flatters the scores: {known:,}"


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
    ranking.add_block(vectors[questions, 0], corpus, 0)
    found = compute_metrics(grades, ranking.rows)
    return {name: found[name.replace("@", "_")] for name in RANKED}
