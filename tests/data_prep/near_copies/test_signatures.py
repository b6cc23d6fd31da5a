"""Documents that are alike share a key as likely as is promised."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.near_copies import VOCABULARY, Document, alter, draw_document, shingles_of

from data_prep.common.arrays import Array
from data_prep.near_copies.shingles import Texts
from data_prep.near_copies.signatures import FOUND, MOST_MINIMA, Banding, choose_banding, compute_keys


def keys(documents: Sequence[Document], banding: Banding) -> Array:
    ends = np.cumsum([len(document) for document in documents])
    return compute_keys(Texts(np.concatenate(documents).astype(np.uint16), ends), VOCABULARY.continues, banding)


@given(st.floats(0.5, 0.999))
def test_the_threshold_itself_is_found_as_surely_as_promised(threshold: float) -> None:
    banding = choose_banding(threshold)
    assert banding.chance(threshold) >= FOUND
    assert banding.bands * banding.rows <= MOST_MINIMA
    one_more = Banding(MOST_MINIMA // (banding.rows + 1), banding.rows + 1)
    assert one_more.chance(threshold) < FOUND, "one row more would leave fewer pairs below the threshold"


def test_above_the_threshold_almost_all_are_found_and_far_below_it_few() -> None:
    for threshold in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        banding = choose_banding(threshold)
        above = np.mean([banding.chance(index) for index in np.linspace(threshold, 1, 101)])
        assert above > 0.985
        assert banding.chance(threshold / 4) < 0.05
    assert choose_banding(0.8) == Banding(13, 7)


@pytest.mark.parametrize("changes", [1, 4, 12])
def test_minima_are_shared_as_often_as_the_index_says(changes: int) -> None:
    """With one row a band, each minimum has a key. Of 128 draws, the share strays from the index as chance says."""
    draw = random.Random(changes)
    documents = [draw_document(draw, draw.randint(30, 200)) for _ in range(300)]
    others = [alter(draw, document, changes) for document in documents]
    sets = [(shingles_of(one), shingles_of(other)) for one, other in zip(documents, others, strict=True)]
    indices = np.array([len(one & other) / len(one | other) for one, other in sets])
    same = keys(documents, Banding(128, 1)) == keys(others, Banding(128, 1))
    strays = (same.mean(axis=1) - indices) / np.sqrt(np.maximum(indices * (1 - indices), 0.01) / 128)
    assert abs(strays.mean()) < 0.2
    assert 0.8 < strays.std() < 1.2
    by_function = same.mean(axis=0)
    assert np.all(abs(by_function - indices.mean()) < 5 * np.sqrt(0.25 / 300))


def test_equal_documents_share_all_keys_and_others_none() -> None:
    draw = random.Random(5)
    documents = [draw_document(draw, 50) for _ in range(50)]
    found = keys([*documents, *documents], choose_banding(0.8))
    np.testing.assert_array_equal(found[:50], found[50:])
    assert len(np.unique(found[:50])) == 50 * 13
