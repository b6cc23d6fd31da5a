"""Filters ask of documents what they say they do; a sieve lets documents through as they say."""

import sys
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import assert_refusal

from data_prep.readers import filters
from data_prep.readers.filters import MOST_EXAMPLES, Filter, ForbiddenWords, Sieve, add_up, make_filters
from data_prep.readers.reader import Document
from data_prep.settings import Settings
from data_prep.work import DocumentsRecord

CHARACTERS = "aaB  .9-_é\u0301中ก—\xa0\u3000\x85\x1cİσςΣıßẞ😀"
PASSAGES = st.lists(st.text(CHARACTERS, max_size=12), min_size=1, max_size=6)
CORPORA = st.lists(PASSAGES, max_size=5)
WORDS = st.lists(st.text("aB.é中ςßİ ", min_size=1, max_size=4), min_size=1, max_size=5)


def failing(asked: Filter, texts: Sequence[list[str]]) -> list[bool]:
    """Asks about all texts at once."""
    return list(asked.fail([Document("", "", text) for text in texts]))


def one_filter(**settings: Any) -> Filter:
    [asked] = make_filters(Settings(**settings))
    return asked


def words_of(passages: list[str]) -> list[str]:
    return [word for passage in passages for word in passage.split()]


@given(CORPORA, st.integers(1, 8))
def test_documents_of_too_few_or_too_many_words_fail(texts: list[list[str]], limit: int) -> None:
    counts = [len(words_of(text)) for text in texts]
    assert failing(one_filter(min_words=limit), texts) == [count < limit for count in counts]
    assert failing(one_filter(max_words=limit), texts) == [count > limit for count in counts]
    assert [one_filter(min_words=limit).figure(Document("", "", text)) for text in texts] == [*map(str, counts)]


@given(CORPORA, st.sampled_from([0.1, 0.25, 0.5, 0.8, 1.0]))
def test_documents_of_too_few_words_with_letters_fail(texts: list[list[str]], least: float) -> None:
    expected = []
    for words in map(words_of, texts):
        lettered = sum(any(map(str.isalpha, word)) for word in words)
        expected.append(not words or lettered / len(words) < least)
    assert failing(one_filter(min_letters=least), texts) == expected


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=10), max_size=5), st.sampled_from([0, 0.3, 0.5]))
def test_documents_of_too_many_repeated_lines_fail(texts: list[list[str]], most: float) -> None:
    repeated = [sum(line in text[:at] for at, line in enumerate(text)) for text in texts]
    shares = [Fraction(count, len(text)) for count, text in zip(repeated, texts, strict=True)]
    assert failing(one_filter(max_repeated_lines=most), texts) == [share > Fraction(str(most)) for share in shares]


def has_word(passages: list[str], words: Sequence[str]) -> bool:
    """Looks for every word at every place of every passage."""
    for passage in (" ".join(passage.split()).lower() for passage in passages):
        for at in range(len(passage)):
            for word in words:
                beside = passage[max(at - 1, 0) : at] + passage[at + len(word) : at + len(word) + 1]
                joined = [one for one in beside if one == "_" or unicodedata.category(one)[0] in "LMN"]
                if passage.startswith(word, at) and not set(joined) - {"中", "ก"}:
                    return True
    return False


@given(CORPORA, WORDS)
def test_documents_with_a_word_of_the_list_fail(texts: list[list[str]], given_words: list[str]) -> None:
    words = [word for one in given_words if (word := " ".join(one.lower().split()))]
    if words:
        assert failing(ForbiddenWords(tuple(words)), texts) == [has_word(text, words) for text in texts]


ALONE = {"It is BAD.": "bad", "badly, unbad, bad_1": "", "badly bad": "bad", "badé BADE\u0301": "", "这是坏的": "坏"}
ALONE |= {"two  \tWORDS": "two words", "two\u3000words": "two words", "two\x0b\x1c\x85words": "two words"}
ALONE |= {"two\nwords": "", "ÄHNLICH (so)": "ähnlich", "unähnlich ähnliche": ""}


@pytest.mark.parametrize(("text", "word"), ALONE.items())
def test_a_word_stands_alone_whatever_its_case(text: str, word: str) -> None:
    asked, document = ForbiddenWords(("bad", "two words", "ähnlich", "坏")), Document("", "", text.split("\n"))
    assert (asked.fail([document]), asked.figure(document)) == ([bool(word)], word)


def test_any_letter_is_found_by_its_small_one_in_a_list_of_thousands() -> None:
    capitals = [char for char in map(chr, range(sys.maxunicode + 1)) if char.lower() != char]
    asked = ForbiddenWords(tuple(sorted({f"{char.lower()}x" for char in capitals})))
    assert len(asked.words) > 1000
    assert all(failing(asked, [[f"so {char}x."] for char in capitals]))
    assert failing(asked, [["so x."], ["so ax1."]]) == [False, False]


def test_a_list_of_words_is_what_its_lines_say(tmp_path: Path) -> None:
    path, other = tmp_path / "words.txt", tmp_path / "other.txt"
    path.write_bytes("\ufeffBad\r\n\n  two   Words\nbad\n".encode())
    assert filters.read_words(path) == ("bad", "two words")
    for words, is_same in {"two words\nbad": True, "two words\nbads": False}.items():
        other.write_text(words)
        assert (filters.describe_words(path) == filters.describe_words(other)) == is_same


UNREADABLE = [(None, "No such file"), (b"\n \n", "has no word in it"), (b"a\n\xff\xfe", "not UTF-8: byte 2")]


@pytest.mark.parametrize(("content", "message"), UNREADABLE)
def test_a_list_that_cannot_be_read_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_bytes(content)
    assert_refusal(f"--without-words {path}: .*{message}", make_filters, Settings(without_words=path))


LANGUAGES = {
    "en": "The river rises in the hills above the town and flows through three lakes before it reaches the sea.",
    "de": "Der Fluss entspringt in den Hügeln über der Stadt und fließt durch drei Seen, bevor er das Meer erreicht.",
    "fr": "La rivière prend sa source dans les collines au-dessus de la ville et traverse trois lacs avant la mer.",
    "ru": "Река берёт начало на холмах над городом и протекает через три озера, прежде чем впасть в море.",
    "zh": "这条河发源于城镇上方的山丘，流经三个湖泊后注入大海。",
}


@pytest.mark.parametrize("code", ["de", "zh"])
def test_documents_of_another_language_fail(code: str) -> None:
    asked, texts = one_filter(only_language=code), [[text] for text in LANGUAGES.values()]
    assert failing(asked, texts) == [other != code for other in LANGUAGES]
    assert [asked.figure(Document("", "", text)) for text in texts] == [*LANGUAGES]
    begins_in_german = [*[LANGUAGES["de"]] * 3, *[LANGUAGES["fr"]] * 50]
    assert failing(asked, [begins_in_german]) == [code != "de"]


def test_without_its_package_a_language_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    filters._language_model.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    said = r"--only-language needs the package py3langid.*pip install py3langid"
    assert_refusal(said, make_filters, Settings(only_language="en"))


FILTERS = make_filters(Settings(min_words=3, max_words=6))
SIZES = st.lists(st.integers(0, 9), max_size=80)


def documents_of(sizes: list[int]) -> list[Document]:
    """Makes documents of so many words; one of no words has no passage."""
    return [Document(str(n), "", ["word " * size] if size else []) for n, size in enumerate(sizes)]


EMPTY: dict[str, Any] = {"files": [], "skipped": [], "left_out": [], "replaced": 0}


def sifted(sizes: list[int], block: int = 1 << 20, name: str = "task") -> tuple[list[Document], DocumentsRecord]:
    one = Sieve(name, FILTERS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(filters, "BLOCK", block)
        passed = list(one.sift(documents_of(sizes)))
    return passed, DocumentsRecord(**EMPTY, source=name, filtered=one.record())


@given(SIZES, st.integers(1, 60))
def test_those_that_pass_all_filters_stay_in_their_order(sizes: list[int], block: int) -> None:
    """However many are asked at once. Examples are some of those left out."""
    passed, record = sifted(sizes, block)
    assert (passed, record) == sifted(sizes)
    assert [document.id for document in passed] == [str(n) for n, size in enumerate(sizes) if 3 <= size <= 6]
    totals = add_up([record])
    counts = {name: total.number for name, total in totals.items()}
    assert counts == {"min_words": sum(0 < size < 3 for size in sizes), "max_words": sum(size > 6 for size in sizes)}
    assert record.num_filtered == sum(counts.values())
    shown = [int(one.id) for _, one in totals["min_words"].examples]
    assert (len(shown), shown) == (min(MOST_EXAMPLES, counts["min_words"]), sorted({*shown}))
    assert all(0 < sizes[number] < 3 for number in shown)
    assert [one.figure for _, one in totals["min_words"].examples] == [str(sizes[number]) for number in shown]


def test_examples_come_from_all_tasks_and_from_all_over_them() -> None:
    examples = add_up(sifted([1] * 1000, name=str(n))[1] for n in range(4))["min_words"].examples
    assert len(examples) == MOST_EXAMPLES
    sources, numbers = [source for source, _ in examples], [int(one.id) for _, one in examples]
    assert sources == sorted(sources)
    assert len({*sources}) >= 3
    assert min(numbers) < 250
    assert max(numbers) > 750


def test_examples_are_cut_short() -> None:
    one = Sieve("task", FILTERS)
    assert not list(one.sift([Document("", "", ["x" * 150, "y" * 150]), Document("", "", ["z " * 1000])]))
    beginnings = {name: own.examples[0].beginning for name, own in one.record().items()}
    assert beginnings == {"min_words": "x" * 150 + " " + "y" * 49, "max_words": "z " * 100}
