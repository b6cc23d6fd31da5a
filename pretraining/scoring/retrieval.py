"""Retrieval: how well the vectors of a model find the passages that answer queries.

A folder has BEIR's form: queries.jsonl and corpus.jsonl (`_id`, `text`, and perhaps `title`; .gz too), and
qrels/test.tsv with a line of names, then a query, a passage and a grade. Passages are ranked exactly, by blocks: memory
holds the vectors of the queries and of one block, the best passages of every query, and some 200 bytes for each passage
of the corpus while it is checked, 4 afterwards. The metrics are those of trec_eval, which breaks ties of fp32 scores by
the id of the passage, the last first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.readers.tables import read_objects, read_tsv

QUERIES, CORPUS, QRELS = "queries.jsonl", "corpus.jsonl", "qrels/test.tsv"
BEST, FIRST = 100, 10
"""The number of ranked passages of a query, and of those whose order counts."""
BLOCK, TOGETHER = 4096, 1 << 24
"""Passages whose vectors are in memory at once, and products that are."""
TINY = 1e-12
"""The least length that a vector is divided by."""
Compute = Callable[[Sequence[str]], Array]
"""Computes the vectors of texts, (texts, width)."""


class Best(NamedTuple):
    """The best passages of some queries, the best first; rows of the corpus, -1 where there are fewer."""

    rows: Array  # (q, BEST) int64
    scores: Array  # (q, BEST) fp32


@dataclass(frozen=True)
class RetrievalScores:
    """Scores of a model on a folder, means over queries with their standard errors."""

    queries: int
    passages: int
    ndcg_10: float
    recall_100: float
    mrr_10: float
    ndcg_10_error: float
    recall_100_error: float
    mrr_10_error: float

    def describe(self) -> str:
        """Describes the scores in one line."""
        values = (self.ndcg_10, self.recall_100, self.mrr_10)
        errors = (self.ndcg_10_error, self.recall_100_error, self.mrr_10_error)
        named = zip(("nDCG@10", "recall@100", "MRR@10"), values, errors, strict=True)
        return "  ".join(f"{name} {value:.4f} ± {error:.4f}" for name, value, error in named)


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Queries with graded passages, checked; the passages are read on demand."""

    corpus: Path
    names: tuple[str, ...]
    """ids of the queries with a relevant passage"""
    queries: tuple[str, ...]
    """their texts"""
    grades: tuple[dict[int, int], ...]
    """for each query the positive grades of passages, by their rows in the corpus"""
    places: Array
    """(passages,) int32: the place of each passage in the order of ids"""

    @classmethod
    def read(cls, folder: Path) -> Retrieval:
        """Reads and checks a folder; raises UserError for what is wrong with it."""
        corpus, qrels = _find_file(folder, CORPUS), _find_file(folder, QRELS)
        judged = _read_grades(qrels)
        texts = _read_queries(_find_file(folder, QUERIES), judged)
        names = [name for name, _ in _read_texts(corpus)]
        order = sorted(range(len(names)), key=names.__getitem__)
        for one, other in itertools.pairwise(order):
            if names[one] == names[other]:
                raise UserError(f"{corpus}: two passages have the id {names[one]!r}")
        wanted = {name for passages in judged.values() for name in passages}
        rows = {name: row for row, name in enumerate(names) if name in wanted}
        lacking = ((QUERIES, judged.keys() - texts.keys()), (CORPUS, wanted - rows.keys()))
        if unknown := next((f"{min(ids)!r} is in no line of {file}" for file, ids in lacking if ids), None):
            raise UserError(f"{qrels}: {unknown}")
        positive = {
            query: found
            for query, passages in judged.items()
            if (found := {rows[name]: grade for name, grade in passages.items() if grade > 0})
        }
        if not positive:
            raise UserError(f"{qrels}: no query has a passage with a grade above 0")
        places = np.empty(len(names), np.int32)
        places[order] = np.arange(len(names))
        return cls(corpus, tuple(positive), tuple(texts[name] for name in positive), tuple(positive.values()), places)

    def blocks(self) -> Iterator[tuple[int, list[str]]]:
        """Yields the texts of the passages in blocks, each with the row of its first."""
        texts = (text for _, text in _read_texts(self.corpus))
        for first in itertools.count(0, BLOCK):
            if not (block := list(itertools.islice(texts, BLOCK))):
                return
            yield first, block

    def rank(
        self,
        compute: Compute,
        by_dot: bool = False,
        before: Callable[[], None] = lambda: None,
        rank: int = 0,
        ranks: int = 1,
    ) -> Best:
        """Finds the best passages of every query by the cosine of vectors, or by their product.

        Each of several ranks reads some of the blocks, so the results must be merged. `before` is called before each
        block, equally often on all ranks.
        """
        vectors = prepare(compute(self.queries), by_dot, [f"query {name!r}" for name in self.names])
        best = self.start()
        for number, (first, texts) in enumerate(self.blocks()):
            if number % ranks == 0:
                before()
            if number % ranks == rank:
                names = [f"{self.corpus}: passage {row:,}" for row in range(first + 1, first + len(texts) + 1)]
                self.rank_block(best, vectors, prepare(compute(texts), by_dot, names), first)
        return best

    def merge(self, parts: Sequence[Best]) -> Best:
        """Merges the best passages of several parts of the corpus."""
        best = self.start()
        for part in parts:
            query, column = np.nonzero(part.rows >= 0)
            self._insert(best, slice(None), query, part.rows[query, column], part.scores[query, column])
        return best

    def score(self, best: Best) -> RetrievalScores:
        """Computes the scores of a ranking."""
        found = measure(self.grades, best.rows)
        count = len(self.grades)
        errors = found.std(axis=1, ddof=min(1, count - 1)) / np.sqrt(count)
        return RetrievalScores(count, len(self.places), *found.mean(axis=1).tolist(), *errors.tolist())

    def start(self) -> Best:
        """Makes a ranking without passages."""
        size = len(self.queries), BEST
        return Best(np.full(size, -1), np.full(size, -np.inf, np.float32))

    def rank_block(self, best: Best, queries: Array, passages: Array, first: int) -> None:
        """Inserts the passages of a block, of which `first` is the first row."""
        most = max(1, TOGETHER // len(passages))
        for start in range(0, len(queries), most):
            own = slice(start, start + most)
            products, least = queries[own] @ passages.T, best.scores[own, -1]
            if len(passages) > BEST:
                least = np.maximum(least, np.partition(products, -BEST, axis=1)[:, -BEST])
            query, column = np.nonzero(products >= least[:, None])
            self._insert(best, own, query, first + column, products[query, column])

    def _insert(self, best: Best, own: slice, query: Array, rows: Array, scores: Array) -> None:
        """Inserts passages, each found for one of its own queries, among the best of these."""
        kept = np.nonzero(best.rows[own] >= 0)
        query, rows = np.concatenate([kept[0], query]), np.concatenate([best.rows[own][kept], rows])
        scores = np.concatenate([best.scores[own][kept], scores])
        order = np.lexsort((-self.places[rows], -scores, query))
        query = query[order]
        place = np.arange(len(query)) - np.searchsorted(query, query)
        chosen, query, place = order[place < BEST], query[place < BEST], place[place < BEST]
        best.rows[own][query, place], best.scores[own][query, place] = rows[chosen], scores[chosen]


def measure(grades: Sequence[dict[int, int]], rows: Array) -> Array:
    """Computes nDCG@10, recall@100 and MRR@10 of every query, (3, queries), from the rows of its best passages."""
    gained = np.array([[of.get(row, 0) for row in own] for of, own in zip(grades, rows.tolist(), strict=True)])
    ideal = np.zeros((len(grades), FIRST))
    for number, of in enumerate(grades):
        highest = sorted(of.values(), reverse=True)[:FIRST]
        ideal[number, : len(highest)] = highest
    discounts = 1 / np.log2(np.arange(2, FIRST + 2))
    first = np.where(gained[:, :FIRST] > 0, 1 / np.arange(1, FIRST + 1), 0).max(axis=1)
    recall = (gained > 0).sum(axis=1) / [len(of) for of in grades]
    return np.stack([gained[:, :FIRST] @ discounts / (ideal @ discounts), recall, first])


def prepare(vectors: Array, by_dot: bool, names: Sequence[str]) -> Array:
    """Divides vectors by their lengths, unless they are compared `by_dot`; raises UserError with the name of one that
    is not of finite numbers."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise UserError(f"{names[int(finite.argmin())]}: its vector has NaN or infinite numbers: the model is damaged")
    return vectors if by_dot else vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), TINY)


def _find_file(folder: Path, name: str) -> Path:
    """Finds a file of a folder, perhaps compressed."""
    found = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if found is None:
        raise UserError(f"{folder / name}: no such file; a folder for retrieval has {QUERIES}, {CORPUS} and {QRELS}")
    return found


def _read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the id and the text of every row, with its title before it."""
    for line, row in read_objects(path):
        name, text, title = row.get("_id"), row.get("text"), row.get("title") or ""
        if not isinstance(name, str | int) or not isinstance(text, str) or not isinstance(title, str):
            raise UserError(f'{path}:{line}: should have "_id" and "text", and perhaps "title"')
        if not (both := f"{title} {text}".strip()):
            raise UserError(f"{path}:{line}: {name!r} has no text")
        yield str(name), both


def _read_queries(path: Path, wanted: Container[str]) -> dict[str, str]:
    """Reads the texts of queries by their ids."""
    found: dict[str, str] = {}
    for name, text in _read_texts(path):
        if name in found:
            raise UserError(f"{path}: two queries have the id {name!r}")
        found |= {name: text} if name in wanted else {}
    return found


def _read_grades(path: Path) -> dict[str, dict[str, int]]:
    """Reads the grades of passages by the ids of queries."""
    table = read_tsv(path)
    found: dict[str, dict[str, int]] = {}
    for row, (query, passage, grade) in enumerate(zip(*map(table.column, range(3)), strict=True)):
        try:
            found.setdefault(query, {})[passage] = int(grade)
        except ValueError:
            table.fail(row, f"the grade {grade!r} is not a whole number")
    return found
