"""Examples without pairs: whole sentences, as many as fit."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.original import CHANCE
from support.segments import (
    LENGTHS,
    ONE_PIECE_SENTENCES,
    SEED,
    SHORT,
    Sizes,
    all_rows,
    corpus_of,
    document_sizes,
    first_of_each,
    starts_of,
    varied,
)

from data_prep.examples.pairs import plan_sentences


@settings(deadline=None, max_examples=300)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_without_pairs_nothing_of_a_document_is_lost(documents: Sizes, length: int, short: float, seed: int) -> None:
    corpus = corpus_of(documents)
    plan = plan_sentences(corpus, all_rows(corpus), length, 0, seed, short)
    for row in all_rows(corpus):
        mine = plan.row == row
        parts = [range(*bounds) for bounds in zip(plan.a_start[mine], plan.a_end[mine], strict=True)]
        begin = sum(sum(document) for document in documents[:row])
        assert list(itertools.chain(*parts)) == list(range(begin, begin + sum(documents[row])))
        assert all(1 <= len(part) <= length - 2 for part in parts)
    assert (plan.partner == -1).all()
    assert (plan.b_end == plan.b_start).all()


@settings(deadline=None, max_examples=300)
@given(document_sizes(), LENGTHS, st.integers(0, 2**63 - 1))
def test_without_pairs_as_many_sentences_as_fit_make_an_example(documents: Sizes, length: int, seed: int) -> None:
    """A sentence is cut only where it is longer than the room, and what is left of it begins the next example."""
    corpus, room = corpus_of(documents), length - 2
    plan = plan_sentences(corpus, all_rows(corpus), length, 0, seed, 0.0)
    starts, ends = starts_of(corpus.sentence_ends), corpus.sentence_ends
    for row, start, end in zip(plan.row, plan.a_start, plan.a_end, strict=True):
        if end not in ends:
            assert end - start == room
            assert np.searchsorted(starts, start, side="right") == np.searchsorted(starts, end, side="right")
        elif end != ends[corpus.document_ends[row] - 1]:
            assert ends[np.searchsorted(ends, end) + 1] - start > room


def test_without_pairs_short_targets_are_as_with_them() -> None:
    plan = plan_sentences(corpus_of(ONE_PIECE_SENTENCES), np.arange(3000), 15, 0, SEED, 1.0)
    targets = (plan.a_end - plan.a_start)[first_of_each(plan.row)]
    assert (targets.min(), targets.max()) == (2, 13)
    assert stats.chisquare(np.bincount(targets - 2, minlength=12)).pvalue > CHANCE


def test_without_pairs_the_examples_of_a_document_depend_on_no_other() -> None:
    documents = varied(30)
    corpus = corpus_of(documents)
    together = plan_sentences(corpus, all_rows(corpus), 32, 1, SEED, 0.5)
    alone = plan_sentences(corpus_of(documents[20:], 20), np.array([5]), 32, 1, SEED, 0.5)
    mine = together.row == 25
    np.testing.assert_array_equal(alone.state, together.state[mine])
    before = sum(sum(document) for document in documents[:20])
    np.testing.assert_array_equal(alone.a_start + before, together.a_start[mine])
    np.testing.assert_array_equal(alone.a_end + before, together.a_end[mine])
