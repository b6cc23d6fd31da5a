"""Retrieval: how well the vectors of a model find the passages that answer queries.

A folder has BEIR's form: queries.jsonl and corpus.jsonl (`_id`, `text`, and perhaps `title`; .gz too), and
qrels/test.tsv with a line of names, then a query, a passage and a grade. Passages are ranked exactly, by blocks: memory
holds the vectors of the queries and of one block, the best passages of every query, and some 200 bytes for each passage
of the corpus while it is checked, 4 afterwards. The metrics are those of trec_eval, which breaks ties of fp32 scores by
the id of the passage, the last first.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.readers.reader import group_rows
from data_prep.readers.tables import read_objects, read_tsv

QUERIES, CORPUS, QRELS = "queries.jsonl", "corpus.jsonl", "qrels/test.tsv"
METRICS = {"ndcg_10": "nDCG@10", "recall_100": "recall@100", "mrr_10": "MRR@10"}
BEST, FIRST = 100, 10
"""The number of ranked passages of a query, and of those whose order counts."""
Compute = Callable[[Sequence[str]], Array]
BLOCK, TOGETHER = 4096, 1 << 24
"""Passages whose vectors are in memory at once, and products that are."""
TINY = 1e-12
"""The least length that a vector is divided by."""


class Ranking:
    """The best passages of queries among those that were added: of equal scores, the one with the highest place."""

    def __init__(self, queries: int, count: int, places: Array | None = None) -> None:
        """`places`: of each passage; by default an earlier one is before a later one."""
        self.rows = np.full((queries, count), -1)
        """(queries, count) numbers of passages, the best first; -1 where there are fewer"""
        self.scores = np.full((queries, count), -np.inf, np.float32)
        self._places = places

    def add_block(self, queries: Array, passages: Array, first: int) -> None:
        """Adds the passages with these vectors, scored by their products with those of all queries; `first` is the
        number of the first one."""
        count, most = self.rows.shape[1], max(1, TOGETHER // len(passages))
        for start in range(0, len(queries), most):
            own = slice(start, start + most)
            products, least = queries[own] @ passages.T, self.scores[own, -1]
            if len(passages) > count:
                least = np.maximum(least, np.partition(products, -count, axis=1)[:, -count])
            query, column = np.nonzero(products >= least[:, None])
            self._insert(own, query, first + column, products[query, column])

    def add_ranking(self, rows: Array, scores: Array) -> None:
        """Adds the passages of another ranking of the same queries."""
        self._insert(slice(None), np.repeat(np.arange(len(rows)), rows.shape[1]), rows.ravel(), scores.ravel())

    def _insert(self, own: slice, query: Array, rows: Array, scores: Array) -> None:
        """Inserts passages, each found for one of its own queries, among the best of these."""
        kept, count = self.rows[own], self.rows.shape[1]
        query = np.concatenate([np.repeat(np.arange(len(kept)), count), query])
        rows, scores = np.concatenate([kept.ravel(), rows]), np.concatenate([self.scores[own].ravel(), scores])
        order = np.lexsort((rows if self._places is None else -self._places[rows], -scores, query))
        place = np.arange(len(query)) - np.searchsorted(query[order], query[order])
        best = order[place < count].reshape(-1, count)
        self.rows[own], self.scores[own] = rows[best], scores[best]


@dataclass(frozen=True)
class RetrievalScores:
    """Scores of a model on a folder by the names of METRICS: means over queries, with their standard errors."""

    queries: int
    passages: int
    scores: dict[str, float]
    errors: dict[str, float]
    """empty for one query"""

    def describe(self) -> str:
        """Describes the scores in one line."""
        errors = {name: f" ± {error:.4f}" for name, error in self.errors.items()}
        return "  ".join(f"{METRICS[name]} {score:.4f}{errors.get(name, '')}" for name, score in self.scores.items())


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
    own: Array
    """(queries,) rows of the passages that do not count, since they have the id of their query; otherwise -1"""
    places: Array
    """(passages,) int32: the place of each passage in the order of ids"""

    @classmethod
    def read(cls, folder: Path) -> Retrieval:
        """Reads and checks a folder; raises UserError for what is wrong with it."""
        asked, corpus, qrels = (_find_file(folder, name) for name in (QUERIES, CORPUS, QRELS))
        judged = _read_grades(qrels)
        texts = dict[str, str]()
        for name, text in _read_texts(asked):
            if name in texts or (name in judged and not text):
                raise UserError(f"{asked}: the query {name!r} {'is there twice' if text else 'has no text'}")
            texts |= {name: text} if name in judged else {}
        names, empty = list[str](), 0
        for name, text in _read_texts(corpus):
            names.append(name)
            empty += not text
        if empty:
            warnings.warn(f"{corpus}: passages without text: {empty:,}", stacklevel=2)
        order = sorted(range(len(names)), key=names.__getitem__)
        for one, other in itertools.pairwise(order):
            if names[one] == names[other]:
                raise UserError(f"{corpus}: two passages have the id {names[one]!r}")
        wanted = {name for passages in judged.values() for name in passages}
        rows = {name: row for row, name in enumerate(names) if name in wanted or name in texts}
        lacking = ((QUERIES, judged.keys() - texts.keys()), (CORPUS, wanted - rows.keys()))
        if unknown := next((f"{min(ids)!r} is in no line of {file}" for file, ids in lacking if ids), None):
            raise UserError(f"{qrels}: {unknown}")
        grades = {query: {rows[name]: grade for name, grade in of.items() if grade > 0} for query, of in judged.items()}
        positive = {query: found for query, found in grades.items() if found}
        if not positive:
            raise UserError(f"{qrels}: no query has a passage with a grade above 0")
        places = np.empty(len(names), np.int32)
        places[order] = np.arange(len(names))
        own = np.array([-1 if (row := rows.get(name, -1)) in found else row for name, found in positive.items()])
        queries = tuple(texts[name] for name in positive)
        return cls(corpus, tuple(positive), queries, tuple(positive.values()), own, places)

    def read_blocks(self) -> Iterator[tuple[int, list[str]]]:
        """Yields the texts of the passages in blocks, each with the row of its first."""
        texts = (text for _, text in _read_texts(self.corpus))
        for number, block in enumerate(group_rows(texts, lambda _: 1, BLOCK)):
            yield number * BLOCK, block

    def rank(
        self,
        compute: Compute,
        by_dot: bool = False,
        before: Callable[[], None] = lambda: None,
        place: tuple[int, int] = (0, 1),
    ) -> Ranking:
        """Finds the best passages of every query by the cosine of vectors, or by their product.

        Each of several ranks takes a part of each block, so the rankings must be added; `place` is a rank and their
        number. `before` is called before each block.
        """
        before()
        queries, found = normalize_vectors(compute(self.queries), by_dot, "query", self.names), self.start_ranking()
        for first, texts in self.read_blocks():
            before()
            begin, end = (len(texts) * rank // place[1] for rank in (place[0], place[0] + 1))
            if begin < end:
                rows = range(first + begin + 1, first + end + 1)
                passages = normalize_vectors(compute(texts[begin:end]), by_dot, f"{self.corpus}: passage", rows)
                found.add_block(queries, passages, first + begin)
        return found

    def start_ranking(self) -> Ranking:
        return Ranking(len(self.queries), BEST + 1, self.places)

    def score(self, rows: Array) -> RetrievalScores:
        """Computes the scores of the rows of a ranking."""
        others = np.argsort(rows == self.own[:, None], axis=1, kind="stable")[:, :BEST]
        found, count = compute_metrics(self.grades, np.take_along_axis(rows, others, axis=1)), len(self.grades)
        scores = {name: float(each.mean()) for name, each in found.items()}
        errors = {name: float(each.std(ddof=1) / np.sqrt(count)) for name, each in found.items() if count > 1}
        return RetrievalScores(count, len(self.places), scores, errors)


def compute_metrics(grades: Sequence[dict[int, int]], rows: Array) -> dict[str, Array]:
    """Computes the METRICS of every query, (queries,), from the rows of its best passages."""
    gained = np.array([[of.get(row, 0) for row in own] for of, own in zip(grades, rows.tolist(), strict=True)])
    ideal = np.zeros((len(grades), FIRST))
    for number, of in enumerate(grades):
        highest = sorted(of.values(), reverse=True)[:FIRST]
        ideal[number, : len(highest)] = highest
    discounts = 1 / np.log2(np.arange(2, FIRST + 2))
    first = np.where(gained[:, :FIRST] > 0, 1 / np.arange(1, FIRST + 1), 0).max(axis=1)
    recall = (gained > 0).sum(axis=1) / [len(of) for of in grades]
    return dict(zip(METRICS, (gained[:, :FIRST] @ discounts / (ideal @ discounts), recall, first), strict=True))


def normalize_vectors(vectors: Array, by_dot: bool, what: str, names: Sequence[str | int]) -> Array:
    """Divides vectors by their lengths, unless they are compared `by_dot`; raises UserError with the name of one that
    is not of finite numbers."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise UserError(f"{what} {names[int(finite.argmin())]}: its vector has NaN or infinity: the model is damaged")
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
        yield str(name), f"{title} {text}".strip()


def _read_grades(path: Path) -> dict[str, dict[str, int]]:
    """Reads the grades of passages by the ids of queries."""
    table = read_tsv(path)
    if table.names[2:] and table.names[2].strip().lstrip("+-").isdigit():
        raise UserError(f"{path}:1: a grade, {table.names[2]}, where the names of the columns should stand")
    found: dict[str, dict[str, int]] = {}
    for row, (query, passage, grade) in enumerate(zip(*map(table.column, range(3)), strict=True)):
        if passage in found.get(query, ()):
            table.fail(row, f"the passage {passage!r} is graded twice for the query {query!r}")
        try:
            found.setdefault(query, {})[passage] = int(grade)
        except ValueError:
            table.fail(row, f"the grade {grade!r} is not a whole number")
    return found
