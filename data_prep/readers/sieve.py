"""Lets documents through filters while they are read; counts those that stay out, and shows some of them."""

from __future__ import annotations

import bisect
import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from data_prep.common.files import FileRecord, replacing
from data_prep.readers.filters import Filter
from data_prep.readers.reader import Document
from data_prep.seals import FILTERED_REPORT
from data_prep.settings import Settings, spell_flag
from data_prep.work import DocumentsRecord, Filtered, FilteredExample

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
        """Yields the documents that pass all filters; another is counted by the first that it fails."""
        for block in _blocks(documents):
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


def _blocks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups documents, of which those without any text are passed over."""
    block: list[Document] = []
    size = 0
    for document in documents:
        if document.passages:
            block.append(document)
            size += sum(map(len, document.passages))
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


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
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for name, total in add_up(records).items():
        for source, one in total.examples:
            table.writerow((spell_flag(name), one.figure, source, one.id, one.title, one.beginning))
    with replacing(folder / FILTERED_REPORT) as file:
        file.write(text.getvalue().encode())
    return FileRecord.from_file(folder, FILTERED_REPORT)


def none_left(records: Iterable[DocumentsRecord], settings: Settings) -> str:
    """Says that no document is left and which filters left them out, each with an example."""
    lines = ["the filters leave no document:"]
    for name, total in add_up(records).items():
        if total.number:
            _, first = total.examples[0]
            said = f"{total.number:,}, such as {first.title or first.id} ({first.figure})"
            lines.append(f"  {spell_flag(name)} {getattr(settings, name)} left out {said}")
    return "\n".join([*lines, "give other thresholds"])
