"""Step 1, documents: turns files of any format into Arrow files of documents, which are lists of their sentences."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path

import pyarrow as pa

from data_prep.arrow_files import make_list_type, make_schema, write_batches
from data_prep.common.errors import check_all
from data_prep.readers.filters import Filter, Sieve
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Document, Options, Problems, group_rows, replace_path
from data_prep.readers.sources import Bundle, SourceFile, make_bundles
from data_prep.readers.splitting import split_sentences
from data_prep.settings import TEXT_FIELD, Errors, Settings
from data_prep.shards import WORK
from data_prep.work import DocumentsRecord, TextFile

SCHEMA = make_schema(id=pa.string(), title=pa.string(), sentences=make_list_type(pa.string()))
PLACES, SAMPLE = 32, 1 << 19  # parts of a sample, and its characters: read in a second


@dataclass(frozen=True)
class ExtractTask:
    """Asks a worker to read one bundle."""

    folder: Path
    """The output folder."""
    bundle: Bundle
    language: str
    text_field: str
    errors: Errors
    filters: tuple[Filter, ...] = ()
    """What documents are asked before they are split into sentences; those that fail are left out."""
    limit: float = math.inf
    """After how many characters of text it stops, for a sample."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step, and from the same one with its text in another field."""
        if not list_readers()[self.bundle.format].has_fields or self.text_field == TEXT_FIELD:
            return self.bundle.name
        return f"{self.bundle.name}-{hashlib.sha256(self.text_field.encode()).hexdigest()[:8]}"

    @property
    def weight(self) -> int:
        """Says how many bytes the task reads."""
        return self.bundle.weight


def try_first_records(files: Sequence[SourceFile], text_field_of: Callable[[str], str], errors: Errors) -> None:
    """Reads a record of each source whose text is in a field, so that a field that is not there is told at once.

    Raises UserError with the faults of all sources, before anything is written.
    """
    first = {(file.source, file.format): file for file in reversed(files) if list_readers()[file.format].has_fields}

    def try_first(file: SourceFile) -> None:
        reader = list_readers()[file.format]
        options = Options(Problems(errors), text_field_of(file.source), file.source)
        for span in reader.spans(Path(file.path), file.size)[:1]:
            next(reader.read(span, options), None)

    check_all(*(partial(try_first, file) for file in reversed(first.values())))


def sample_sources(files: Sequence[SourceFile], s: Settings, filters: Sequence[Filter]) -> Iterator[tuple[str, str]]:
    """Yields the name of every source and a sample of its text that passes the filters, from places all over it."""
    for source in (names := dict.fromkeys(file.source for file in files)):
        bundles = make_bundles([file for file in files if file.source == source])
        chosen = bundles[:: -(-len(bundles) * len(names) // PLACES) or 1]
        limit = max(SAMPLE // len(names), SAMPLE // PLACES) // max(1, len(chosen))
        options = Options(Problems("skip"), s.text_field_of(source), source, limit)
        read = (chain.from_iterable(list_readers()[b.format].read(span, options) for span in b.spans) for b in chosen)
        groups = (next(group_rows(documents, attrgetter("size"), limit), []) for documents in read)
        documents = Sieve("", filters).sift(chain.from_iterable(groups))
        yield source, "\n".join(" ".join(document.passages)[:limit] for document in documents)


def extract(task: ExtractTask) -> DocumentsRecord:
    """Writes the documents of a bundle into files; a bundle of one huge file makes several."""
    problems = Problems(task.errors)
    reader = list_readers()[task.bundle.format]
    options = Options(problems, task.text_field, task.bundle.source)

    def documents() -> Iterator[Document]:
        size = 0
        for document in chain.from_iterable(reader.read(span, options) for span in task.bundle.spans):
            if size >= task.limit:
                return
            size += document.size
            yield document

    empty = 0

    def in_sentences(documents: Iterable[Document]) -> Iterator[Document]:
        nonlocal empty
        for document in documents:
            passages = document.passages
            sentences = passages if reader.has_sentences else split_sentences(task.language, passages)
            if sentences:
                yield Document(document.id, document.title, sentences)
            else:
                empty += 1

    sieve = Sieve(task.name, task.filters)
    passed = sieve.sift(documents()) if task.filters else documents()
    parts = []
    groups = group_rows(in_sentences(passed), attrgetter("size"), task.bundle.part_bytes)
    for number, batch in enumerate(map(_make_batch, groups)):  # no name keeps a group while the next one is read
        name = f"{WORK}/documents/{task.name[:3]}/{task.name}-{number:04}.arrow"
        record = write_batches(task.folder, name, SCHEMA, [batch])
        parts.append(TextFile(**record.as_json(), text_bytes=batch["sentences"].values.nbytes))
    return DocumentsRecord(
        files=parts,
        source=task.bundle.source,
        skipped=problems.skipped,
        left_out=[replace_path(fault, dict(task.bundle.called)) for fault in problems.skipped],
        replaced=problems.num_replaced,
        filtered=sieve.record(),
        empty=empty,
        no_text={f"{task.bundle.format}: {what}": count for what, count in problems.no_text.items()},
    )


def _make_batch(group: list[Document]) -> pa.RecordBatch:
    """Puts documents into a record batch."""
    columns = [[one.id for one in group], [one.title for one in group], [one.passages for one in group]]
    return pa.record_batch(columns, schema=SCHEMA)
