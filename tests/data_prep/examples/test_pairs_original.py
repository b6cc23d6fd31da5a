"""The examples of a corpus, as a whole: distributed as the original's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats
from support import original
from support.original import CHANCE, chance_alike
from support.segments import (
    corpus_of,
    first_of_each,
    last_of_each,
    make,
    starts_of,
    varied,
)

from data_prep.common.arrays import Array


class Features(NamedTuple):
    """What examples are like: every feature an array, all of one length."""

    document: Array
    num_examples: Array  # of their document
    random_next: Array
    num_sentences_a: Array
    size_a: Array
    size_b: Array
    size: Array
    whole_a: Array
    whole_b: Array
    lost_at_front_of_a: Array
    lost_at_front_of_b: Array
    beginning_of_b: Array  # its first sentence, as a share of the document it is of, in percent

    def of(self, examples: Array) -> Features:
        return Features(*(column[examples] for column in self))


DOCUMENTS, LENGTH, DUPLICATES = varied(400), 64, 6


def our_features(short: float) -> list[Features]:
    corpus = corpus_of(DOCUMENTS)
    starts, first_sentences = starts_of(corpus.sentence_ends), starts_of(corpus.document_ends)
    num_sentences = np.diff(corpus.document_ends, prepend=0)
    features = []
    for duplicate in range(DUPLICATES):
        _, _, whole, plan = make(corpus, LENGTH, duplicate, seed=duplicate % 2, short=short)
        home = np.where(plan.partner < 0, plan.row, plan.partner)
        sentence_b = np.searchsorted(starts, whole.b_start) - first_sentences[home]
        num_a = np.searchsorted(starts, whole.a_end - 1, side="right") - np.searchsorted(starts, whole.a_start)
        size_a, size_b = plan.a_end - plan.a_start, plan.b_end - plan.b_start
        features.append(
            Features(
                plan.row,
                np.bincount(plan.row)[plan.row],
                plan.partner >= 0,
                num_a,
                size_a,
                size_b,
                size_a + size_b,
                whole.a_end - whole.a_start,
                whole.b_end - whole.b_start,
                plan.a_start - whole.a_start,
                plan.b_start - whole.b_start,
                100 * sentence_b // num_sentences[home],
            )
        )
    return features


def their_features(short: float) -> list[Features]:
    pieces = iter(range(10**9))
    documents = [[[next(pieces) for _ in range(size)] for size in document] for document in DOCUMENTS]
    sentence_of = {sentence[0]: at for document in documents for at, sentence in enumerate(document)}
    draw = Random(3)
    features = []
    for _ in range(DUPLICATES):
        rows = []
        for own in range(len(documents)):
            pairs = original.make_pairs(documents, own, LENGTH, short, draw)
            for pair in pairs:
                a, b, whole_a, whole_b = pair.a, pair.b, pair.whole_a, pair.whole_b
                home = own if pair.partner is None else pair.partner
                rows.append(
                    (
                        own,
                        len(pairs),
                        pair.partner is not None,
                        pair.num_sentences_a,
                        len(a),
                        len(b),
                        len(a) + len(b),
                        len(whole_a),
                        len(whole_b),
                        a[0] - whole_a[0],
                        b[0] - whole_b[0],
                        100 * sentence_of[whole_b[0]] // len(documents[home]),
                    )
                )
        features.append(Features(*np.array(rows).T))
    return features


@functools.cache
def both(short: float) -> tuple[list[Features], list[Features]]:
    """Makes our examples and the original's, in sets, with this share of short targets."""
    return our_features(short), their_features(short)


def joined(sets: list[Features]) -> Features:
    return Features(*(np.concatenate(columns) for columns in zip(*sets, strict=True)))


@pytest.mark.parametrize("short", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("choose", [first_of_each, last_of_each])
@pytest.mark.parametrize("feature", Features._fields[1:])
def test_examples_are_distributed_as_the_original_ones(
    short: float, choose: Callable[[Array], Array], feature: str
) -> None:
    """Only one example of a document is compared, since those of a document share its target."""
    ours, theirs = (
        getattr(joined([features.of(choose(features.document)) for features in side]), feature) for side in both(short)
    )
    assert len(ours) == len(theirs) == DUPLICATES * len(DOCUMENTS)
    assert chance_alike(ours, theirs) > CHANCE
    assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > CHANCE


@pytest.mark.parametrize("feature", Features._fields[3:])
@pytest.mark.parametrize("random_next", [False, True])
def test_all_examples_are_distributed_as_the_original_ones(feature: str, random_next: bool) -> None:
    """Where all targets are the same, the examples of a document are near enough independent to compare them all."""
    ours, theirs = (joined(side) for side in both(0.0))
    assert len(theirs.document) > 5000
    ours, theirs = (getattr(side.of(side.random_next == random_next), feature) for side in (ours, theirs))
    assert chance_alike(ours, theirs) > CHANCE
    assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > CHANCE
