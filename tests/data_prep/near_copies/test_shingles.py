"""What two documents have in common is counted as sets of groups of words, read from pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from support.near_copies import FIRST_ENDING, FIRST_WORD, PIECES, VOCABULARY, Document, shingles_of

from data_prep.common.arrays import Array
from data_prep.near_copies.shingles import count_slots, fill_shingles, jaccard

few_words = st.integers(FIRST_WORD, FIRST_WORD + 2)  # so few that shingles repeat
pieces = st.lists(few_words | st.integers(FIRST_ENDING, FIRST_ENDING + 1), min_size=1, max_size=60)


def shingles(document: Document) -> Array:
    """Hashes the shingles of a document, which stands between two others."""
    there = np.array([FIRST_WORD, *document, FIRST_ENDING, FIRST_WORD], np.uint16)
    found = np.empty(len(document), np.uint64)
    return found[: fill_shingles(found, there, 1, len(document) + 1, VOCABULARY.continues)]


@given(pieces)
@example([FIRST_ENDING])
@example([FIRST_WORD] * 4)
@example([FIRST_WORD] * 5)
def test_there_are_as_many_different_shingles_as_groups_of_words(document: Document) -> None:
    assert len(np.unique(shingles(document))) == len(shingles_of(document))


@given(pieces, pieces, st.integers(0, 30))
@example([FIRST_WORD, FIRST_ENDING], [FIRST_WORD + 1, FIRST_ENDING], 0)
def test_the_index_is_that_of_the_sets(one: Document, other: Document, shared: int) -> None:
    other = [*one[:shared], *other]
    here, there = shingles_of(one), shingles_of(other)
    hashes = shingles(one), shingles(other)
    room = count_slots(sum(map(len, hashes)))
    slots, owners = np.empty(room, np.uint64), np.full(room, 9, np.uint8)
    assert jaccard(*hashes, slots, owners) == len(here & there) / len(here | there)


def test_equal_words_in_another_order_are_other_shingles() -> None:
    words = [FIRST_WORD + number for number in range(30)]
    assert not {*shingles(words).tolist()} & {*shingles(words[::-1]).tolist()}


def test_the_same_hashes_on_every_machine() -> None:
    """They decide which documents are left out, so they may not change."""
    assert len(PIECES) == 445
    assert [hex(value) for value in shingles([FIRST_WORD, FIRST_ENDING, *range(FIRST_WORD, FIRST_WORD + 5)])] == [
        "0xfd4c4f2af8d14f1d",
        "0x498753ce1fed4b82",
    ]
