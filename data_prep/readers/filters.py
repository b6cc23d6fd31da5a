"""Filters of documents; those that fail are left out while they are read, and counted, and some of them are shown.

Thresholds that are usual, and the papers that they come from, are in docs/preparation.md.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, readable, write_csv
from data_prep.readers.reader import Document, group_rows
from data_prep.seals import FILTERED_REPORT
from data_prep.settings import Settings, spell_flag
from data_prep.work import DocumentsRecord, Filtered, FilteredExample

WHITE, LETTER, OTHER = 0, 1, 2  # kinds of characters
SLICE = 1 << 15  # characters that are looked up at once, few enough for the cache of a processor
BLANKS = r"[\s\pZ\x0b\x1c-\x1f\x{85}]+"
"""White space as Python has it, for RE2."""
TOGETHER = 500  # words that are looked for at once: with thousands, RE2 falls back to what takes many times as long
UNPARTED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""The characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which part no words."""

LANGUAGE_PACKAGE = "py3langid"
FIRST = 300  # characters by which the language of a document is told


@dataclass(frozen=True)
class Limit:
    """Requires that a measure of a document lies between two numbers."""

    name: str
    measure: Callable[[Sequence[Document]], Array]
    low: float = 0
    high: float = float("inf")

    def fail(self, documents: Sequence[Document]) -> list[bool]:
        """Returns for each document whether its measure is less or more."""
        numbers = self.measure(documents)
        return list(((numbers < self.low) | (numbers > self.high)).tolist())

    def figure(self, document: Document) -> str:
        """Formats the measure of a document."""
        return f"{self.measure([document])[0]:.7g}"


def count_words(documents: Sequence[Document]) -> Array:
    """Counts the words of documents, separated by white space."""
    _, begins, bounds = _find_words(documents)
    return np.diff(np.searchsorted(begins, bounds))


def measure_lettered_share(documents: Sequence[Document]) -> Array:
    """Measures the share of the words of documents that have a letter."""
    kinds, begins, bounds = _find_words(documents)
    lettered = begins[np.logical_or.reduceat(kinds == LETTER, begins)] if begins.size else begins
    counts, total = (np.diff(np.searchsorted(words, bounds)) for words in (lettered, begins))
    return counts / np.maximum(total, 1)


def measure_repeated_share(documents: Sequence[Document]) -> Array:
    """Measures the share of the passages of documents that repeat an earlier one of the document."""
    counts = ((len(document.passages), len(set(document.passages))) for document in documents)
    return np.array([(total - different) / max(total, 1) for total, different in counts])


def _find_words(documents: Sequence[Document]) -> tuple[Array, Array, Array]:
    """Finds the kinds of all characters of documents, where words begin among them, and where documents do."""
    texts = [" ".join(document.passages) + " " for document in documents]
    text = "".join(texts)
    kinds = np.empty(len(text), np.uint8)
    for at in range(0, len(text), SLICE):
        codes = np.frombuffer(text[at : at + SLICE].encode("utf-32-le"), np.uint32)
        kinds[at : at + SLICE] = _classify_characters().take(codes)
    inside = kinds != WHITE
    inside[1:] &= kinds[:-1] == WHITE
    return kinds, np.flatnonzero(inside), np.cumsum([0, *map(len, texts)])


@functools.cache
def _classify_characters() -> Array:
    """Makes a table of the kinds of all characters, by their codes."""
    chars = map(chr, range(sys.maxunicode + 1))
    return np.array([WHITE if char.isspace() else LETTER if char.isalpha() else OTHER for char in chars], np.uint8)


@dataclass(frozen=True)
class ForbiddenWords:
    """Requires that no word of a list stands alone in a document, whatever its case."""

    words: tuple[str, ...]
    """Words and phrases in lower case."""
    name: str = "without_words"

    def fail(self, documents: Sequence[Document]) -> list[bool]:
        """Tells which of the documents have a word of the list; all but the likely ones are sorted out by RE2."""
        texts = pa.array(["\n".join(document.passages) for document in documents], pa.large_string())
        likely = (pc.match_substring_regex(texts, pattern) for pattern in self._patterns())
        pairs = zip(documents, functools.reduce(pc.or_, likely).to_pylist(), strict=True)
        return [maybe and self._find(document) is not None for document, maybe in pairs]

    def figure(self, document: Document) -> str:
        """Names a word of the list that a document has."""
        return self._find(document) or ""

    def _patterns(self) -> Iterator[str]:
        """Spells the words, some together, as regular expressions that find all of them, and more beyond ASCII."""
        for at in range(0, len(self.words), TOGETHER):
            spelled = (BLANKS.join(map(re.escape, word.split())) for word in self.words[at : at + TOGETHER])
            any_of_them = "|".join(spelled).replace("i\u0307", "(?:i\u0307|\u0130)")  # a pair that RE2 does not know
            yield f"(?i)(?:^|[^0-9a-z_])(?:{any_of_them})(?:$|[^0-9a-z_])"

    def _find(self, document: Document) -> str | None:
        """Finds the first word of the list that stands alone in a document."""
        text = "\n".join(" ".join(passage.split()) for passage in document.passages).lower()
        return next((word for word in self.words if word in text and _stands_alone(word, text)), None)


def _stands_alone(word: str, text: str) -> bool:
    """Tells whether a word is in a text with neither a letter nor a digit nor _ beside it."""
    at = text.find(word)
    while at >= 0:
        end = at + len(word)
        if not (any(map(_joins, text[at - 1 : at])) or any(map(_joins, text[end : end + 1]))):
            return True
        at = text.find(word, at + 1)
    return False


def _joins(char: str) -> bool:
    """Tells whether a character belongs to the word that it stands beside."""
    return (char == "_" or unicodedata.category(char)[0] in "LMN") and not UNPARTED.match(char)


def read_words(path: Path) -> tuple[str, ...]:
    """Reads a list of words and phrases, one a line; raises UserError where there is none."""
    try:
        with readable(f"--without-words {path}"):
            lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--without-words {path}: not UTF-8: byte {error.start:,}; it is a word a line") from error
    words = tuple(sorted({" ".join(line.lower().split()) for line in lines} - {""}))
    if not words:
        raise UserError(f"--without-words {path}: has no word in it; it is a word or a phrase a line")
    return words


def describe_words(path: Path | None) -> str | None:
    """Describes a list of words for the recorded settings, whatever its path: a count and a hash."""
    if path is None:
        return None
    words = read_words(path)
    return f"{len(words):,} words ({hashlib.sha256('/'.join(words).encode()).hexdigest()[:16]})"


@dataclass(frozen=True)
class OneLanguage:
    """Requires documents in a language."""

    code: str
    name: str = "only_language"

    def fail(self, documents: Sequence[Document]) -> list[bool]:
        """Returns for each document whether it is in another language."""
        return [self.figure(document) != self.code for document in documents]

    def figure(self, document: Document) -> str:
        """Predicts the language of a document from its beginning."""
        beginning = "".join(f"{passage[:FIRST]} " for passage in document.passages[:FIRST])[:FIRST]
        return str(_language_model().classify(beginning)[0])


@functools.cache
def _language_model() -> Any:
    """Loads the model of languages, once in a process; raises UserError where its package is missing."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        cure = f"pip install {LANGUAGE_PACKAGE} (or '.[language]')"
        raise UserError(f"--only-language needs the package {LANGUAGE_PACKAGE}, with its model: {cure}") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE)


def _one_language(code: str) -> OneLanguage:
    """Makes the filter for a language; raises UserError where the model does not know it."""
    known = _language_model().labels
    if code not in known:
        raise UserError(f"--only-language {code}: the model knows {' '.join(sorted(known))}")
    return OneLanguage(code)


Filter = Limit | ForbiddenWords | OneLanguage
"""A condition on documents, with the name of its setting: it tells which documents fail, and their figures."""
LIMITS: dict[str, tuple[Callable[[Sequence[Document]], Array], str]] = {
    "min_words": (count_words, "low"),
    "max_words": (count_words, "high"),
    "min_letters": (measure_lettered_share, "low"),
    "max_repeated_lines": (measure_repeated_share, "high"),
}
"""Settings that are limits: the figure that each limits, and whether it is the lowest or the highest value."""


def make_filters(settings: Settings) -> tuple[Filter, ...]:
    """Makes the filters that settings ask for, in the order in which documents are asked."""
    s, filters = settings, list[Filter]()
    for name, (measure, side) in LIMITS.items():
        if (limit := getattr(s, name)) is not None:
            filters.append(Limit(name, measure, **{side: limit}))
    if s.without_words is not None:
        filters.append(ForbiddenWords(read_words(s.without_words)))
    if s.only_language is not None:
        filters.append(_one_language(s.only_language))
    return tuple(filters)


BLOCK = 1 << 22  # characters of documents that a filter is asked about at once
MOST_EXAMPLES = 20  # documents that the report shows of each filter
BEGINNING = 200  # characters that it shows of each
COLUMNS = ("filter", "figure", "source", "id", "title", "beginning")


@dataclass
class Sieve:
    """The filters of a task, and what each has left out of its documents so far."""

    task: str
    """The name of the task."""
    filters: Sequence[Filter]
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[FilteredExample]] = field(default_factory=dict)
    _read: int = 0

    def sift(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents that pass all filters. One that fails is counted under the first filter that it fails.

        Documents without any text are passed over.
        """
        for block in group_rows(filter(attrgetter("passages"), documents), attrgetter("size"), BLOCK):
            numbered = list(enumerate(block, self._read))
            self._read += len(block)
            for one in self.filters:
                failed = one.fail([document for _, document in numbered])
                for (number, document), fails in zip(numbered, failed, strict=True):
                    if fails:
                        self._leave_out(one, number, document)
                numbered = [entry for entry, fails in zip(numbered, failed, strict=True) if not fails]
            yield from (document for _, document in numbered)

    def _leave_out(self, asked: Filter, number: int, document: Document) -> None:
        """Counts a document that fails, and keeps it as an example where its rank is among the smallest."""
        self.counts[asked.name] += 1
        examples = self.examples.setdefault(asked.name, [])
        rank = hashlib.sha256(f"{self.task}/{number}".encode()).hexdigest()[:16]
        if len(examples) == MOST_EXAMPLES and rank > examples[-1].rank:
            return
        beginning = " ".join(passage[:BEGINNING] for passage in document.passages[:BEGINNING])[:BEGINNING]
        own = FilteredExample(rank, number, asked.figure(document), document.id, document.title, beginning)
        bisect.insort(examples, own, key=attrgetter("rank"))
        del examples[MOST_EXAMPLES:]

    def record(self) -> dict[str, Filtered]:
        """Tells what each filter has left out."""
        return {one.name: Filtered(self.counts[one.name], self.examples.get(one.name, [])) for one in self.filters}


class Total(NamedTuple):
    """What a filter left out of the whole text."""

    number: int
    examples: list[tuple[str, FilteredExample]]
    """Examples with their sources, in the order of the corpus."""


def add_up(records: Iterable[DocumentsRecord]) -> dict[str, Total]:
    """Adds up what each filter left out in all tasks, and draws examples from those of all, whoever did which task."""
    counts: Counter[str] = Counter()
    drawn: dict[str, list[tuple[int, str, FilteredExample]]] = {}
    for task, record in enumerate(records):
        for name, filtered in record.filtered.items():
            counts[name] += filtered.count
            found = [*drawn.get(name, []), *((task, record.source, example) for example in filtered.examples)]
            drawn[name] = sorted(found, key=lambda entry: (entry[2].rank, entry[0]))[:MOST_EXAMPLES]
    return {
        name: Total(counts[name], [entry[1:] for entry in sorted(found, key=lambda one: (one[0], one[2].number))])
        for name, found in drawn.items()
    }


def write_report(folder: Path, records: Iterable[DocumentsRecord]) -> FileRecord:
    """Writes a table of some documents that filters left out, from all over the corpus."""
    rows = [
        (spell_flag(name), one.figure, source, one.id, one.title, one.beginning)
        for name, total in add_up(records).items()
        for source, one in total.examples
    ]
    return write_csv(folder, FILTERED_REPORT, COLUMNS, rows)


def none_left(records: Iterable[DocumentsRecord], settings: Settings) -> str:
    """Says that no document is left and how many each filter left out."""
    counts = {name: total.number for name, total in add_up(records).items() if total.number}
    lines = (f"  {spell_flag(name)} {getattr(settings, name)} left out {count:,}" for name, count in counts.items())
    return "\n".join(["the filters leave no document:", *lines, "give other thresholds"])
