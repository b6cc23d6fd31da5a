"""Words added to a vocabulary: which, in which order, and what stays as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data_prep.common.errors import UserError
from data_prep.vocabulary.extension import LEAST, extend_vocabulary, find_replaced_pieces
from data_prep.vocabulary.vocabulary import SPECIAL, Vocabulary

LETTERS = "abcdefgh"
BASE = Vocabulary((*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "bad", "##face", "."), cased=False)


def test_words_are_added_by_what_they_save_and_ties_by_the_alphabet() -> None:
    """Not "héhé", which the tokenizer reads as "hehe"."""
    counts = {"bad": 1000, "abc": 10, "cab": 10, "face": 30, "badface": 25, "gag": LEAST - 1, "a": 99, "héhé": 5}
    done = extend_vocabulary(BASE, counts, 4)
    assert done.added == (
        "face",
        "badface",
        "abc",
        "cab",
    )  # 30 x 3, 25 x 1, 10 x 2 each
    assert done.vocabulary.pieces == (*BASE.pieces, *done.added)
    before = 1000 + 30 + 30 + 120 + 50 + 12 + 99 + 20
    after = 1000 + 10 + 10 + 30 + 25 + 12 + 99 + 20
    assert (done.before, done.after) == (before, after)
    said = "4 words added to 24 pieces: face, badface, abc, cab; they make 1,361 pieces of text 1,206 (-11.4%)"
    assert str(done) == said


def test_words_that_were_unknown_are_added_as_if_cut_into_characters() -> None:
    done = extend_vocabulary(BASE, {"xyz": 10, "abc": 11, "中": 50}, 2)
    assert done.added == ("中", "abc")
    assert extend_vocabulary(BASE, {"xyz": 10, "abc": 10, "中": 50}, 3).added == ("中", "abc", "xyz")


def test_no_word_of_the_text_becomes_unknown() -> None:
    """ "baf" would cut "bafxe" into "baf" and "##x", which no piece is, though "##xe" is one."""
    base = Vocabulary((*BASE.pieces, "##fxe"), cased=False)
    counts = {"baf": 50, "bafxe": LEAST - 1, "cab": 10}
    assert extend_vocabulary(base, counts, 2).added == ("cab",)


def test_there_may_be_fewer_words_than_asked_for_but_not_none() -> None:
    done = extend_vocabulary(BASE, {"abc": 10, "d": 10}, 1000)
    assert done.added == ("abc",)
    assert str(done).startswith("1 words of 1,000 asked for added to 24 pieces: abc; ")
    assert str(done).endswith("; a word must occur 5 times to be added")
    with pytest.raises(UserError, match="no word of the text is worth a piece"):
        extend_vocabulary(BASE, {"d": 10, "abc": LEAST - 1}, 1000)


WORDS = st.text(alphabet=LETTERS + "éxβ中", min_size=1, max_size=6)


@given(st.dictionaries(WORDS, st.integers(1, 50), min_size=1), st.lists(WORDS))
@example({"ae": 5}, ["aé"])
def test_old_ids_stay_and_the_tokenizer_of_transformers_agrees(counts: dict[str, int], others: list[str]) -> None:
    """Text without new words has the ids that it had; a new word is one piece; nothing counted becomes unknown."""
    normal = BASE.pipeline().normalizer.normalize_str
    counts = {word: count for word, count in counts.items() if normal(word) == word}
    try:
        done = extend_vocabulary(BASE, counts, 5)
    except UserError:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, vocabulary in (("old", BASE), ("new", done.vocabulary)):
            vocabulary.write(Path(folder) / name)
        old, new = (AutoTokenizer.from_pretrained(f"{folder}/{name}") for name in ("old", "new"))
    for number, word in enumerate(done.added, len(BASE)):
        assert new(word, add_special_tokens=False).input_ids == [number]
    for word in [*counts, *others]:
        before, after = (tokenizer(word, add_special_tokens=False).input_ids for tokenizer in (old, new))
        assert after == done.vocabulary.pipeline().encode(word, add_special_tokens=False).ids
        if not any(normal(word).startswith(added) for added in done.added) and "中" not in word:
            assert after == before
        if word in counts and old.unk_token_id not in before:
            assert new.unk_token_id not in after
            assert len(after) <= len(before) or any(word.startswith(added) for added in done.added)


def test_what_a_new_piece_replaces() -> None:
    ids = {piece: number for number, piece in enumerate(BASE.pieces)}
    assert find_replaced_pieces(BASE, ["badface", "##bad", "xax", "中"]) == [
        [ids["bad"], ids["##face"]],
        [ids["bad"]],
        [ids["##a"], ids["a"]],
        [],
    ]
