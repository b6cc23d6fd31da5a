"""Words that are not ASCII are normalised and split as `tokenizers` does it to each of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.vocabulary.splitting import BAR, TOGETHER, WordSplitter
from data_prep.vocabulary.vocabulary import build_text_rules

CHARACTERS = st.one_of(
    st.sampled_from("aB9éßΣσςİ\u0301\u0323\u0345\u0000\u00a0\u2028\u200b\ufffd–“”…≠；;`中한क\u1fef\u037e"),
    st.characters(exclude_categories=["Cs"]),
)
WORDS = st.text(CHARACTERS, min_size=1, max_size=12).map(lambda word: word.replace(BAR, ""))


def one_by_one(words: list[str], cased: bool) -> list[list[str]]:
    normalizer, pre_tokenizer = build_text_rules(cased)
    split = pre_tokenizer.pre_tokenize_str
    return [[part for part, _ in split(normalizer.normalize_str(word))] for word in words]


@pytest.mark.parametrize("cased", [False, True])
def test_many_words_are_split_like_each_of_them(cased: bool) -> None:
    splitter = WordSplitter(*build_text_rules(cased))

    @settings(max_examples=400, deadline=None)
    @given(st.lists(WORDS, max_size=8))
    def check(words: list[str]) -> None:
        assert list(splitter.split(words)) == one_by_one(words, cased)

    check()


def test_more_words_than_are_normalised_together_keep_their_order() -> None:
    words = [f"é{number}–{number}" for number in range(2 * TOGETHER + 1)]
    assert list(WordSplitter(*build_text_rules(False)).split(words)) == one_by_one(words, False)


@pytest.mark.parametrize("cased", [False, True])
def test_no_character_becomes_the_bar_between_words(cased: bool) -> None:
    characters = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    normalizer, _ = build_text_rules(cased)
    assert normalizer.normalize_str("".join(characters)).count(BAR) == 1
