"""Words with tags as pieces: each is tagged once, with context around it, as transformers cuts it."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transformers_models import PIECES
from transformers import AutoTokenizer

from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.inputs import Cutter
from finetuning.ragged import Ragged
from finetuning.tasks.tagged_words import TaggedWords, Words

VOCABULARY = Vocabulary(PIECES, cased=False)
CUTTER = Cutter(VOCABULARY)
CUTS = st.lists(st.text("abcdef", min_size=1, max_size=9), min_size=1, max_size=40)


@given(CUTS, st.sets(st.integers(1, 39)), st.sets(st.integers(1, 39)), st.integers(3, 40), st.booleans())
def test_every_word_is_tagged_once(
    texts: list[str], cuts: set[int], documents: set[int], length: int, context: bool
) -> None:
    """Whatever the lengths of words, sentences, documents and windows; pieces are letters here, so they are known."""
    inner = {cut for cut in documents if cut < len(texts)}
    document_ends = np.array([*sorted(inner), len(texts)])
    sentence_ends = np.array([*sorted({*inner, *(cut for cut in cuts if cut < len(texts))}), len(texts)])
    words = Words(texts, sentence_ends, document_ends, np.arange(len(texts)))
    items = TaggedWords(words, CUTTER, length, context)
    order = np.random.default_rng(0).permutation(len(items))
    encoded = items.encode(order)
    assert encoded.labels is not None
    assert encoded.words is not None
    assert sorted(encoded.labels.values.tolist()) == list(range(len(texts)))
    assert encoded.sequences.pieces.lengths.max() <= length
    for item in range(len(items)):
        pieces = [PIECES[piece] for piece in encoded.sequences.pieces.row(item)]
        assert (pieces[0], pieces[-1]) == ("[CLS]", "[SEP]")
        places, numbers = encoded.words.row(item), encoded.labels.row(item)
        assert [pieces[place] for place in places] == [texts[number][0] for number in numbers]
        ends = document_ends if context else sentence_ends
        assert len({int(np.searchsorted(ends, number, "right")) for number in numbers}) == 1
        seen = "".join(piece.removeprefix("##") for piece in pieces[1:-1])
        bound = ends[np.searchsorted(ends, numbers[0], "right")]
        first = 0 if bound == ends[0] else ends[ends < bound][-1]
        assert seen in "".join(text[: length - 2] for text in texts[first:bound])


def test_context_is_as_long_on_both_sides() -> None:
    """But at the ends of a document, where all of it is on one side."""
    words = Words(list("abcdefghi"), np.array([2, 4, 5, 7, 9]), np.array([9]))
    spelt = [
        "".join(PIECES[piece] for piece in row)
        for row in _rows(TaggedWords(words, CUTTER, 7, document_context=True).encode(np.arange(5)).sequences.pieces)
    ]
    assert spelt == [f"[CLS]{text}[SEP]" for text in ("abcde", "bcdef", "cdefg", "efghi", "efghi")]


def _rows(ragged: Ragged) -> list[list[int]]:
    return [ragged.row(number).tolist() for number in range(len(ragged))]


def test_a_word_without_pieces_is_unknown() -> None:
    words = Words(["a", "\x07", "b"], np.array([3]), np.array([3]), np.arange(3))
    encoded = TaggedWords(words, CUTTER, 8, document_context=False).encode(np.arange(1))
    assert [PIECES[piece] for piece in encoded.sequences.pieces.values] == ["[CLS]", "a", "[UNK]", "b", "[SEP]"]
    assert encoded.words is not None
    assert encoded.words.values.tolist() == [1, 2, 3]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("vocabulary")
    VOCABULARY.write(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(texts=st.lists(st.text(string.ascii_letters + "éßж1,.", min_size=1, max_size=8), min_size=1, max_size=10))
def test_pieces_are_those_of_transformers(texts: list[str], theirs: Any) -> None:
    words = Words(texts, np.array([len(texts)]), np.array([len(texts)]))
    encoded = TaggedWords(words, CUTTER, 128, document_context=False).encode(np.arange(1))
    expected = theirs(texts, is_split_into_words=True)
    assert encoded.sequences.pieces.values.tolist() == expected["input_ids"]
    firsts = [expected.word_ids().index(number) for number in range(len(texts))]
    assert encoded.words is not None
    assert encoded.words.values.tolist() == firsts
