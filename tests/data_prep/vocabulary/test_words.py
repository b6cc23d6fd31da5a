"""Words are split as the library does it, told apart, numbered and counted."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.arrow_files import write_batches
from data_prep.common.arrays import Array
from data_prep.readers.extraction import SCHEMA
from data_prep.vocabulary import tokens
from data_prep.vocabulary.encoders import keys, words
from data_prep.vocabulary.encoders.splitting import BAR, LONGEST_WORD, TOGETHER, WordSplitter
from data_prep.vocabulary.encoders.words import WordTable
from data_prep.vocabulary.kinds.wordpiece import build_text_rules


def joined(sentences: list[str]) -> tuple[Array, Array]:
    encoded = [sentence.encode() for sentence in sentences]
    ends = np.cumsum([len(sentence) for sentence in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def in_words(table: WordTable, sentences: list[str]) -> list[list[str]]:
    numbers, ends = table.number(*joined(sentences))
    known = table.words()
    return [[known[number] for number in each] for each in np.split(numbers, ends[:-1])]


def plain_words(text: str, cased: bool) -> list[str]:
    """What the words of a text in ASCII are, character by character."""
    found: list[str] = []
    inside = False
    for character in text if cased else text.lower():
        kind = words.classify_bytes(True)[ord(character)]
        if kind > words.FOREIGN and inside:
            found[-1] += character
        elif kind in (words.SPACE, words.DROP):
            inside = inside and kind == words.DROP
        else:
            found.append(character)
            inside = kind > words.FOREIGN
    return [word[: LONGEST_WORD + 1] for word in found]


PARTS = ["a", "Z", "09", "the", "EIGHT888", "fifteen15letter", "sixteen16letters", "@", "[", "`", "{", "/", ":"]
PARTS += [" ", "  ", "\t\n", ".", "\x00", "\x7f", "a" * 95, "b" * 120]
RUNS = st.sampled_from(PARTS) | st.characters(max_codepoint=127)
SENTENCES = st.lists(st.lists(RUNS, max_size=12).map("".join), min_size=1, max_size=6)


@settings(max_examples=120)
@given(SENTENCES, st.booleans())
def test_ascii_is_cut_at_marks_and_white_space_and_freed_of_control_characters(
    sentences: list[str], cased: bool
) -> None:
    expected = [plain_words(sentence, cased) for sentence in sentences]
    table = WordTable(cased)
    assert in_words(table, sentences) == expected
    assert table.words() == list(dict.fromkeys(itertools.chain.from_iterable(expected)))
    assert in_words(table, sentences) == expected  # now that all words are known


FOREIGN = st.sampled_from(["é", "中", "naïve\x00", "–", "\u00a0", "ДА", "Σωκράτης", "か", "𠀀"])


@settings(max_examples=50)
@given(SENTENCES, st.lists(FOREIGN, min_size=1))
def test_a_sentence_has_the_same_words_whatever_follows_it(sentences: list[str], foreign: list[str]) -> None:
    mixed = [*foreign, *sentences, "".join(foreign) + sentences[0], *sentences]
    together = in_words(WordTable(False), mixed)
    assert together == [in_words(WordTable(False), [sentence])[0] for sentence in mixed]


def test_words_with_and_without_a_byte_of_zeros_are_not_the_same() -> None:
    sentences = ["é", "é\x00", "é\x00\x00", "é" * 8, "é" * 8 + "\x00", "é" * 7 + "\x00"]
    table = WordTable(False)
    in_words(table, sentences)
    assert table.words() == sentences


def test_long_words_with_the_same_key_are_told_apart() -> None:
    """Their last eight letters make up for what the eight before them differ in, in the hash of keys.py."""
    one, other = "abcdefghhtmwtioqzwzzzzzz", "abcdefghqahkvggfwqmffyyv"
    first, second = (keys.make_key(np.frombuffer(word.encode(), np.uint64), 24) for word in (one, other))
    assert first == second
    table = WordTable(False)
    assert in_words(table, [f"{one} {other}", f"{other} {one} {one}"]) == [[one, other], [other, one, one]]
    assert table.words() == [one, other]


def test_a_table_that_grows_keeps_its_words() -> None:
    sentences = [" ".join(map(str, range(first, first + 1000))) for first in range(0, 80_000, 1000)]
    sentences += [f"{number:020}" for number in range(40_000)]
    table = WordTable(False)
    assert in_words(table, sentences) == [sentence.split() for sentence in sentences]
    assert table.words() == " ".join(sentences).split()
    assert in_words(table, sentences) == [sentence.split() for sentence in sentences]


UNUSUAL = st.sampled_from("aB9éßΣσςİ\u0301\u0323\u0345\u0000\u00a0\u2028\u200b\ufffd–“”…≠；;`中한क\u1fef\u037e")
CHARACTERS = UNUSUAL | st.characters(exclude_categories=["Cs"])
WORDS = st.text(CHARACTERS, min_size=1, max_size=12).map(lambda word: word.replace(BAR, ""))


def one_by_one(words: list[str], cased: bool) -> list[list[str]]:
    normalizer, pre_tokenizer = build_text_rules(cased)
    split = pre_tokenizer.pre_tokenize_str
    return [[part for part, _ in split(normalizer.normalize_str(word))] for word in words]


@settings(max_examples=200)
@given(st.lists(WORDS, max_size=8), st.booleans())
def test_many_words_are_split_like_each_of_them(words: list[str], cased: bool) -> None:
    assert list(WordSplitter(*build_text_rules(cased)).split(words)) == one_by_one(words, cased)


def test_more_words_than_are_normalised_together_keep_their_order() -> None:
    words = [f"é{number}–{number}" for number in range(2 * TOGETHER + 1)]
    assert list(WordSplitter(*build_text_rules(False)).split(words)) == one_by_one(words, False)


@pytest.mark.parametrize("cased", [False, True])
def test_no_character_becomes_the_bar_between_words(cased: bool) -> None:
    codes = [*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200), *range(0xF0000, 0x110000, 99)]
    characters = map(chr, codes)  # all that Unicode has, and some of those that it leaves to others
    normalizer, _ = build_text_rules(cased)
    assert normalizer.normalize_str("".join(characters)).count(BAR) == 1


def test_words_too_many_to_keep_are_dropped_from_the_rarest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_WORDS", 4)
    paths = []
    for number, counts in enumerate([{"a": 5, "b": 1, "c": 1}, {"d": 3, "e": 1}, {"b": 1, "a": 1}]):
        batch = pa.record_batch([list(counts), list(counts.values())], schema=tokens.COUNTS_SCHEMA)
        write_batches(tmp_path, str(number), tokens.COUNTS_SCHEMA, [batch])
        paths.append(tmp_path / str(number))
    assert tokens.add_up(paths) == {"a": 6, "d": 3, "b": 1}


@pytest.mark.parametrize("cased", [False, True])
def test_words_are_counted_as_the_library_splits_the_text(cased: bool, tmp_path: Path) -> None:
    sentences = [
        "The naïve–reader, THE reader",
        "Ελλάς: ελλας",
        "中文 and it's naïve",
        "\u00a0NAIVE the",
        "é" * 101,
        "σ" * 101,
    ]
    sentences = [*sentences, ""] * 3
    columns = [["a", "b"], ["", ""], [sentences[:8], sentences[8:]]]
    write_batches(tmp_path, "documents/a.arrow", SCHEMA, [pa.record_batch(columns, schema=SCHEMA)])
    record = tokens.count_part(tokens.PartTask(tmp_path, "documents/a.arrow", 1, cased, None))
    normalizer, pre_tokenizer = build_text_rules(cased)
    split = (pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(sentence)) for sentence in sentences)
    expected = Counter(
        word[at : at + LONGEST_WORD]
        for parts in split
        for word, _ in parts
        if len(word) <= LONGEST_WORD or not word.isascii()
        for at in range(0, len(word), LONGEST_WORD)
    )
    assert list(tokens.add_up([tmp_path / record.files[0].path]).items()) == list(expected.items())
