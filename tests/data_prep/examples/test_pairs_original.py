"""The examples of a corpus, as a whole: distributed as the original's."""

import functools
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from scipy import stats
from support.corpora import (
    CHANCE,
    chance_alike,
    corpus_of,
    first_of_each,
    last_of_each,
    make,
    make_pairs,
    starts_of,
    varied,
)

from data_prep.common.arrays import Array

NAMES = tuple("document num_examples random_next num_sentences_a size_a size_b whole_a whole_b".split())
NAMES += ("lost_at_front_of_a", "lost_at_front_of_b", "beginning_of_b")
"""What examples are like: the number of examples is that of their document; the beginning of B, its first sentence, is
a share of the document it is of, in percent."""
Features = dict[str, Array]
"""An array for every name, all of one length."""


def some_of(features: Features, examples: Array) -> Features:
    return {name: column[examples] for name, column in features.items()}


DOCUMENTS, LENGTH, DUPLICATES = varied(400), 64, 6


def our_features(short: float) -> list[Features]:
    corpus = corpus_of(DOCUMENTS)
    starts, first_sentences = starts_of(corpus.sentence_ends), starts_of(corpus.document_ends)
    num_sentences = np.diff(corpus.document_ends, prepend=0)
    features = []
    for duplicate in range(DUPLICATES):
        _, _, whole, plan, _ = make(corpus, LENGTH, duplicate, seed=duplicate % 2, short=short)
        home = np.where(plan.partner < 0, plan.row, plan.partner)
        sentence_b = np.searchsorted(starts, whole.b_start) - first_sentences[home]
        num_a = np.searchsorted(starts, whole.a_end - 1, side="right") - np.searchsorted(starts, whole.a_start)
        both = (plan, whole)
        sizes = [size for each in both for size in (each.a_end - each.a_start, each.b_end - each.b_start)]
        lost = plan.a_start - whole.a_start, plan.b_start - whole.b_start
        beginning = 100 * sentence_b // num_sentences[home]
        columns = (plan.row, np.bincount(plan.row)[plan.row], plan.partner >= 0, num_a, *sizes, *lost, beginning)
        features.append(dict(zip(NAMES, columns, strict=True)))
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
            pairs = make_pairs(documents, own, LENGTH, short, draw)
            for pair in pairs:
                sizes = [*map(len, (pair.a, pair.b, pair.whole_a, pair.whole_b))]
                lost = pair.a[0] - pair.whole_a[0], pair.b[0] - pair.whole_b[0]
                home = own if pair.partner is None else pair.partner
                beginning = 100 * sentence_of[pair.whole_b[0]] // len(documents[home])
                random_next = pair.partner is not None
                rows.append((own, len(pairs), random_next, pair.num_sentences_a, *sizes, *lost, beginning))
        features.append(dict(zip(NAMES, np.array(rows).T, strict=True)))
    return features


@functools.cache
def both(short: float) -> tuple[list[Features], list[Features]]:
    """Makes our examples and the original's, in sets, with this share of short targets."""
    return our_features(short), their_features(short)


def joined(sets: list[Features]) -> Features:
    return {name: np.concatenate([features[name] for features in sets]) for name in NAMES}


@pytest.mark.parametrize("short", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("choose", [first_of_each, last_of_each])
def test_examples_are_distributed_as_the_original_ones(short: float, choose: Callable[[Array], Array]) -> None:
    """Only one example of a document is compared, since those of a document share its target."""
    ours, theirs = (joined([some_of(one, choose(one["document"])) for one in side]) for side in both(short))
    assert len(ours["document"]) == len(theirs["document"]) == DUPLICATES * len(DOCUMENTS)
    assert [name for name in NAMES[1:] if not alike(ours[name], theirs[name])] == []


@pytest.mark.parametrize("random_next", [False, True])
def test_all_examples_are_distributed_as_the_original_ones(random_next: bool) -> None:
    """Where all targets are the same, the examples of a document are near enough independent to compare them all."""
    ours, theirs = (joined(side) for side in both(0.0))
    assert len(theirs["document"]) > 5000
    ours, theirs = (some_of(side, side["random_next"] == random_next) for side in (ours, theirs))
    assert [name for name in NAMES[3:] if not alike(ours[name], theirs[name])] == []


def alike(ours: Array, theirs: Array) -> bool:
    return chance_alike(ours, theirs) > CHANCE and stats.ks_2samp(ours, theirs, method="asymp").pvalue > CHANCE
