"""Our pieces are BertTokenizerFast's, on anything."""

import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import BertNormalizer
from transformers import BertTokenizerFast  # type: ignore[attr-defined, unused-ignore]

from data_prep.readers.extraction import sample_sources
from data_prep.readers.sources import find_files
from data_prep.settings import Settings
from data_prep.vocabulary import tokens
from data_prep.vocabulary.encoders import tables, words
from data_prep.vocabulary.encoders.splitting import LONGEST_WORD
from data_prep.vocabulary.encoders.wordpiece import FastWordPiece
from data_prep.vocabulary.encoders.words import WordTable
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece, describe_lost_marks
from data_prep.vocabulary.vocabulary import Vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("the", "##ing", "river", "##er", "un", "##é", "##中", "ss", "##ss", "[", "]", "mask", "##σ")
MARKED = (f"##{letter}" for letter in LETTERS)
PIECES = (*SPECIAL, *LETTERS, *LETTERS.upper(), *MARKED, *"0123456789.,!?-'\"()[]#é中文ßσ", *WORDS)


def vocabulary(cased: bool) -> Vocabulary:
    return WordPiece(tuple(dict.fromkeys(PIECES)), cased)


def reference(folder: Path, table: Vocabulary) -> BertTokenizerFast:
    table.write(folder)
    return BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=not table.cased)


def encode(encoder: FastWordPiece, sentences: list[str]) -> list[list[int]]:
    pieces = encoder.encode(*tokens._view_text(pa.array(sentences, pa.string())))
    starts = np.concatenate([[0], pieces.ends])[:-1]
    return [pieces.ids[start:end].tolist() for start, end in zip(starts, pieces.ends, strict=True)]


def in_words(table: WordTable, texts: list[str]) -> list[list[str]]:
    numbers, ends = table.number(*tokens._view_text(pa.array(texts, pa.string())))
    known = table.words()
    return [[known[number] for number in each] for each in np.split(numbers, ends[:-1])]


MARKS = "abcdeTHER \t\n\r.,!?-'\"()[]#é中文ßΣσςİ\u0301\u0000\u00a0\u2028\u200b\ufffd\x0b\x1c\x7f"
TEXT = st.text(st.sampled_from(MARKS) | st.characters(exclude_categories=["Cs"]), max_size=60).filter(
    lambda text: not any(special in text for special in SPECIAL)  # these the reference does not take for text
)
OLD_LETTERS = st.characters(categories=["Lu", "Ll", "Lo", "Mn", "Mc"], exclude_characters="\ufe0f").filter(
    lambda character: unicodedata.ucd_3_2_0.category(character) == unicodedata.category(character)  # as all tables say
)


@given(st.text(OLD_LETTERS, min_size=9, max_size=12))
def test_as_many_marks_are_told_as_the_normalizer_strips(word: str) -> None:
    keeps, strips = (BertNormalizer(lowercase=True, strip_accents=strips) for strips in (False, True))
    lower = word.lower()
    lost = len(unicodedata.normalize("NFD", keeps.normalize_str(lower))) - len(strips.normalize_str(lower))
    told = describe_lost_marks(f"{word} " * 50)
    if told:
        assert told.startswith(f"{50 * lost} marks from ")
        assert told.endswith(unicodedata.normalize("NFC", strips.normalize_str(lower).replace(" ", "")))
    else:
        assert lost == 0


LOST = [
    ("Мой чай ещё горячий.", 4, 16, "мой → мои"),
    ("ประเทศไทยมีวัด ที่นี่", 6, 14, "ที่นี่ → ทน"),
    ("がっこうへ", 1, 5, "がっこうへ → かっこうへ"),
    ("Trần Độ là một nhà thơ", 9, 17, "trần → tran"),
    ("schöne Grüße von Jörg", 3, 18, "schöne → schone"),
    ("한국어 中文 العربية ❤️ 1️⃣ x", 0, 0, ""),
    (f"a café {'and more words ' * 20}", 0, 0, ""),
]


@pytest.mark.parametrize(("text", "marks", "letters", "shown"), LOST)
def test_a_word_shows_what_lower_case_changes(text: str, marks: int, letters: int, shown: str) -> None:
    told = f"{500 * marks:,} marks from {500 * letters:,} letters, such as {shown}" if marks else ""
    assert describe_lost_marks(f"{text} " * 500) == told
    assert describe_lost_marks(text[:4]) == ""  # too few marks for a warning


@pytest.mark.realdata
def test_real_vietnamese_is_told_and_real_english_is_not(real_data: Path) -> None:
    for source, is_told in {"wiki": False, "books": False, "wikidump/viwiki-test.xml": True}.items():
        ((_, sample),) = sample_sources(find_files([str(real_data / source)])[::6], Settings(), ())
        assert is_told or len(sample) > 300_000
        assert (" → " in describe_lost_marks(sample)) == is_told


MORE_PIECES = st.text("abehtr éσ中", max_size=200).map(lambda text: text.replace("  ", "").split())


@pytest.mark.parametrize("cased", [False, True])
def test_any_sentences_have_the_pieces_of_the_reference(cased: bool, tmp_path: Path) -> None:
    """With a vocabulary that the reference has read, and with vocabularies of all kinds."""
    expected = reference(tmp_path, vocabulary(cased)).backend_tokenizer

    @settings(max_examples=100)
    @given(MORE_PIECES, st.sampled_from([PIECES, SPECIAL]), st.lists(TEXT, min_size=1, max_size=6))
    def check(more: list[str], pieces: tuple[str, ...], sentences: list[str]) -> None:
        table = WordPiece(tuple(dict.fromkeys((*pieces, *more, *(f"##{piece}" for piece in more)))), cased)
        library = table.pipeline() if more or pieces == SPECIAL else expected
        ids = [library.encode(sentence, add_special_tokens=False).ids for sentence in sentences]
        encoder = FastWordPiece(table.pipeline(), cased)
        assert encode(encoder, sentences) == ids
        assert encode(encoder, sentences) == ids  # now that all words are known

    check()


def test_special_pieces_in_a_text_are_text() -> None:
    table = vocabulary(False)
    encoder = FastWordPiece(table.pipeline(), False)
    [ids] = encode(encoder, ["the [MASK] é[MASK] river"])
    assert not {table.pieces.index(piece) for piece in SPECIAL} & set(ids)
    assert [table.pieces[number] for number in ids][1:4] == ["[", "mask", "]"]


def test_a_table_that_grew_too_large_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    table = vocabulary(False)
    whole, forgetful = FastWordPiece(table.pipeline(), False), FastWordPiece(table.pipeline(), False)
    monkeypatch.setattr(tables, "TABLE_BYTES", 20)
    batches = [["the river under the bridge"], ["unending rivers"], ["the river again"]]
    assert [encode(forgetful, batch) for batch in batches] == [encode(whole, batch) for batch in batches]


def test_words_beyond_the_longest_are_unknown_as_in_the_reference(tmp_path: Path) -> None:
    table = vocabulary(False)
    expected = reference(tmp_path, table)
    encoder = FastWordPiece(table.pipeline(), False)
    sentences = ["a" * 100, "a" * 101, "é" * 101, "σ" * 60, "σ" * 100, "a" * 100_000, "." * 1000]
    ids = [expected.backend_tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in sentences]
    assert encode(encoder, sentences) == ids


LONG_RUNS = st.lists(st.sampled_from("aZéไทกำσ中—- \u0301\u0e34\u200b\x00") | st.text(OLD_LETTERS, max_size=60))
LONG_TEXT = st.lists(st.tuples(LONG_RUNS.map("".join), st.sampled_from([1, 9, 30, 99, 100, 101, 260])), max_size=4)


def cut_before_letters(part: str) -> Iterator[str]:
    """Cuts a part after at most 100 characters, so that none begins with a mark where that can be."""
    while len(part) > LONGEST_WORD:
        letters = (at for at in range(LONGEST_WORD, 0, -1) if not unicodedata.category(part[at]).startswith("M"))
        size = next(letters, LONGEST_WORD)
        yield part[:size]
        part = part[size:]
    yield part


@settings(max_examples=150)
@given(st.booleans(), st.lists(LONG_TEXT.map(lambda runs: "".join(run * times for run, times in runs)), max_size=3))
def test_only_runs_beyond_the_longest_are_cut_and_lost_characters_are_counted(cased: bool, texts: list[str]) -> None:
    """The reference goes from part to part. One in ASCII stays an [UNK], and no cut is before a combining mark."""
    table = vocabulary(cased)
    pipeline = table.pipeline()
    expected: list[list[int]] = []
    characters = lost = 0
    for text in texts:
        expected.append([])
        for part, _ in pipeline.pre_tokenizer.pre_tokenize_str(pipeline.normalizer.normalize_str(text)):
            for chunk in [part] if part.isascii() else cut_before_letters(part):
                ids = [token.id for token in pipeline.model.tokenize(chunk)]
                expected[-1] += ids
                characters += len(chunk)
                lost += len(chunk) * (table.special.unk in ids)
    encoder = FastWordPiece(pipeline, cased)
    assert encode(encoder, texts) == expected
    assert [table.text_pipeline().encode(text, add_special_tokens=False).ids for text in texts] == expected
    pieces = encoder.encode_texts(texts)
    assert (pieces.characters, pieces.lost) == (characters, lost)
    whole = [pipeline.encode(text, add_special_tokens=False).ids for text in texts]
    same = [text for text in range(len(texts)) if table.special.unk not in whole[text]]
    assert [whole[text] for text in same] == [expected[text] for text in same]


def test_exactly_the_characters_that_the_reference_sets_apart_are_set_apart() -> None:
    normalize = vocabulary(True).pipeline().normalizer.normalize_str
    for code in [*range(0x2E00, 0xD800), *range(0xF000, 0x10000), *range(0x1F000, 0x30000)]:
        character = chr(code)
        alone = normalize(f"a{character}b").startswith("a ")
        text = np.frombuffer(character.encode(), np.uint8)
        assert bool(words._measure_ideograph(text, 0, len(text))) == (alone and not character.isspace()), hex(code)
