"""Corpora of bare sizes, and the examples that are planned of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from data_prep.common.arrays import Array
from data_prep.examples.pairs import Segments, place_partners, plan_segments, truncate
from data_prep.examples.parts import Pool
from data_prep.vocabulary.tokens import Corpus

Sizes = Sequence[Sequence[int]]  # documents, as the numbers of pieces of their sentences
SEED = 12345


def corpus_of(documents: Sizes, first: int = 0) -> Corpus:
    """Makes a corpus as it is read from a file, in which a piece is its own position."""
    sentence_ends = np.cumsum([size for document in documents for size in document]).astype(np.int32)
    document_ends = np.cumsum([len(document) for document in documents]).astype(np.int32)
    pieces = (np.arange(sentence_ends[-1]) % (1 << 16)).astype(np.uint16)
    for array in (pieces, sentence_ends, document_ends):
        array.flags.writeable = False
    books = np.arange(len(documents))
    return Corpus(pieces, sentence_ends, document_ends, np.int64(first), books)


def all_rows(corpus: Corpus) -> Array:
    return np.arange(corpus.document_ends.size)


def pool_of(corpus: Corpus) -> Pool:
    """Makes a pool of all documents of a corpus that has no other parts."""
    return Pool(np.zeros(1, np.int64), np.array([corpus.document_ends.size]), np.empty(0, np.int64), True)


def copied(plan: Segments) -> Segments:
    return Segments(*(column.copy() for column in plan))


class Made(NamedTuple):
    """The examples of a corpus, before and after they are truncated."""

    corpus: Corpus
    room: int
    whole: Segments
    plan: Segments
    short: float
    """The share of documents with a short target."""


def make(corpus: Corpus, length: int, duplicate: int = 0, seed: int = SEED, short: float = 0.0) -> Made:
    """Makes all examples of all documents, which are in one file."""
    whole = plan_segments(corpus, all_rows(corpus), pool_of(corpus), length, duplicate, seed, short)
    place_partners(np.flatnonzero(whole.partner >= 0), whole, corpus)
    plan = copied(whole)
    truncate(np.arange(plan.row.size), plan, length - 3)
    return Made(corpus, length - 3, whole, plan, short)


def starts_of(ends: Array) -> Array:
    return np.concatenate([[0], ends[:-1]])


def first_of_each(row: Array) -> Array:
    """Finds the first examples of the documents."""
    return np.unique(row, return_index=True)[1]


def last_of_each(row: Array) -> Array:
    return row.size - 1 - np.unique(row[::-1], return_index=True)[1]


def document_sizes(lengths: int = 40) -> st.SearchStrategy[list[list[int]]]:
    sentence = st.one_of(st.just(1), st.integers(1, 12), st.integers(1, lengths))
    return st.lists(st.lists(sentence, min_size=1, max_size=15), min_size=1, max_size=8)


LENGTHS = st.integers(8, 40)
SHORT = st.sampled_from([0.0, 0.5, 1.0])


def plan_of(size_a: Array, size_b: Array, number: int = 0) -> Segments:
    """Makes a plan of segments of these sizes, with streams of their own."""
    columns = np.zeros((8, size_a.size), np.int64)
    columns[1], columns[2] = 1000, 1000 + size_a
    columns[3], columns[4] = 5_000_000, 5_000_000 + size_b
    columns[5] = -1
    columns[7] = np.random.default_rng(number).integers(0, 2**63, size_a.size)
    return Segments.from_columns(columns)


def truncated(plan: Segments, room: int) -> Segments:
    result = copied(plan)
    truncate(np.arange(plan.row.size), result, room)
    return result


ONE_PIECE_SENTENCES = [[1] * 80] * 3000


def varied(num_documents: int) -> Sizes:
    """Draws documents of one sentence and of many, sentences of one piece and of more than there is room for."""
    draw = Random(11)
    documents = []
    for number in range(num_documents):
        num_sentences = 1 if number % 9 == 0 else draw.randint(2, 40)
        typical = draw.choice([1, 4, 12, 25])
        sizes = [max(1, round(draw.gauss(typical, typical / 2))) for _ in range(num_sentences)]
        if number % 7 == 0:
            sizes[draw.randrange(num_sentences)] = draw.choice([61, 62, 63, 150])
        documents.append(sizes)
    return documents
