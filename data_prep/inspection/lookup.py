"""Finds a training example in a folder of shards, finished or not, with what is known of its document."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import tyro

from data_prep.arrow_files import map_batches, read_batch, read_shard
from data_prep.common.errors import DamageError, UserError
from data_prep.shards import (
    DOCUMENTS,
    DOCUMENTS_SCHEMA,
    PLAN,
    Manifest,
    ShardSet,
    example_schema,
    is_unfinished,
)
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary
from data_prep.work import Record, WorkFolder

SIZES = (1 << 8, 1 << 16, 1 << 32, 1 << 62)  # sizes of vocabularies and corpora, one for each type of number


@dataclass(frozen=True)
class Wanted:
    """Which example of a folder of shards is wanted."""

    data: Annotated[Path, tyro.conf.Positional]
    """The folder that shard.py wrote or is writing."""
    length: int | None = None
    """Length of the examples (default: the shortest there is)."""
    index: int = 0
    """Which example, from 0."""
    duplicate: int = 0
    """Which masking duplicate."""
    validation: bool = False
    """An example of the documents held out."""
    document: str | None = None
    """A document in place of an example: its title, or where none has such a title its number, as examples have it."""
    report: bool = False
    """Make a page of the whole folder, report.html in it, in place of showing an example."""
    report_out: Path | None = None
    """Write that page into this file instead, where the folder is not to be written into."""

    @property
    def is_page(self) -> bool:
        """Whether the page is wanted; raises UserError where something else is asked for too."""
        if not (self.report or self.report_out):
            return False
        if replace(self, report=False, report_out=None) != Wanted(self.data):
            raise UserError("--report: is of the whole folder; leave out what names an example or a document")
        return True


@dataclass(frozen=True)
class Example:
    """A training example."""

    pieces: list[int]
    labels: dict[int, int]
    """The pieces that stood at the masked positions."""
    boundary: int
    random_next: bool
    document: int
    source: str = ""
    """Where the text comes from: source, id and title of the document, as far as they are known."""


def find_example(wanted: Wanted) -> tuple[Example, Vocabulary]:
    """Reads an example and the vocabulary that its pieces are of; raises UserError where there is no such example."""
    example, cased = _in_work_folder(wanted) if is_unfinished(wanted.data) else _in_shards(wanted)
    vocabulary = load_vocabulary(wanted.data / VOCABULARY, cased)
    if max([*example.pieces, *example.labels.values()], default=0) >= len(vocabulary):
        raise DamageError(f"{wanted.data}: example {wanted.index} has a piece beyond its {VOCABULARY}")
    return example, vocabulary


def _in_shards(wanted: Wanted) -> tuple[Example, bool]:
    """Reads an example of a finished folder, and whether its text keeps case."""
    folder, row = wanted.data, wanted.index
    manifest = Manifest.read(folder)
    manifest.require_examples(folder)
    sets = manifest.sets()
    length = min(shards.length for shards in sets) if wanted.length is None else wanted.length
    chosen = ShardSet(length, 0 if wanted.validation else wanted.duplicate, wanted.validation)
    if chosen not in sets:
        raise UserError(f"{folder}: no {chosen.folder}; there is {', '.join(shards.folder for shards in sets)}")
    total = sum(record.rows for record in sets[chosen])
    if not 0 <= row < total:
        raise UserError(f"--index {row}: {chosen.folder} has {total:,} examples, 0 to {total - 1}")
    for record in sets[chosen]:
        if row < record.rows:
            break
        row -= record.rows
    batch = read_examples(record.find(folder), manifest, length, record.rows)
    example = read_example(batch, row, length, folder / record.path)
    source = name_document(read_document_row(folder, example.document))
    return replace(example, source=source), manifest.vocabulary.cased


def read_examples(path: Path, manifest: Manifest, length: int, rows: int) -> pa.RecordBatch:
    """Maps a shard of examples of a length; raises DamageError unless it has the columns and the number of rows."""
    batch = read_shard(path, full=True)
    schema = example_schema(length, manifest.vocabulary_size, manifest.num_documents)
    if batch.schema != schema:
        raise DamageError(f"{path}: its columns are not those of an example of length {length}:\n{batch.schema}")
    if batch.num_rows != rows:
        raise DamageError(f"{path}: {batch.num_rows:,} examples, its record says {rows:,}")
    return batch


def read_example(batch: pa.RecordBatch, row: int, length: int, path: Path) -> Example:
    """Reads a row as an example; raises DamageError where it cannot be one."""
    for name in ("pieces", "masked"):
        size = batch[name].offsets[row + 1].as_py() - batch[name].offsets[row].as_py()
        if size > length:
            raise DamageError(f"{path}: example {row} has {size:,} {name}, longer than its length")
    values = {name: batch[name][row].as_py() for name in ("pieces", "boundary", "random_next", "document")}
    return Example(**values, labels={mask["position"]: mask["piece"] for mask in batch["masked"][row].as_py()})


def _in_work_folder(wanted: Wanted) -> tuple[Example, bool]:
    """Reads an example of an unfinished folder, before the global shuffle, and whether its text keeps case."""
    folder, row = wanted.data, wanted.index
    work = WorkFolder(folder)
    settings = work.read_plan().settings
    if not settings.lengths:
        raise DamageError(f"{folder / PLAN}: settings.lengths is empty: it was edited or is damaged")
    length = min(settings.lengths) if wanted.length is None else wanted.length
    number = settings.duplicates if wanted.validation else wanted.duplicate
    records = sorted(work.read_records(f"examples-{length}"), key=lambda record: record.path)
    places = [_place_of(record, number) for record in records]
    files = [(folder / path, at) for path, at in places if (folder / path).exists()]  # those of shards are gone
    for path, at in files:
        reader = map_batches(path)
        if not 0 <= at < reader.num_record_batches:
            break
        batch = read_batch(reader, at, path)
        if not _is_of_examples(batch.schema, length):
            raise DamageError(f"{path}: its columns are not those of examples")
        if 0 <= row < batch.num_rows:
            return read_example(batch, row, length, path), settings.cased
        row -= batch.num_rows
    raise UserError(
        f"{folder}: not finished, and no such example yet; "
        f"files of examples of length {length} so far: {len(files)}. Run shard.py again to continue"
    )


def _place_of(record: Record, set_index: int) -> tuple[str, int]:
    """Finds the file and the record batch of a set among the examples of a part: one file has all, or each has one."""
    if 0 <= set_index < len(record.files) > 1:
        return record.files[set_index].path, 0
    return record.path, set_index


def _is_of_examples(schema: pa.Schema, length: int) -> bool:
    """Returns whether a schema has the columns of examples and the shuffling key."""
    columns = pa.schema(list(schema)[:-1])
    return any(columns == example_schema(length, size, documents) for size in SIZES for documents in SIZES)


def name_document(row: Mapping[str, str]) -> str:
    """Names a document by its source, id and title, as far as it has these."""
    return " ".join(row[name] for name in ("source", "id", "title") if row.get(name))


def read_document_row(folder: Path, number: int) -> dict[str, str]:
    """Reads the row of the table of documents that has a number; an empty one where there is none."""
    return read_document_rows(folder, [number]).get(number, {})


def read_document_rows(folder: Path, numbers: Iterable[int]) -> dict[int, dict[str, str]]:
    """Reads the rows of the table of documents that have these numbers, as far as there are such, in one pass."""
    path = folder / DOCUMENTS
    reader = map_batches(path)
    wanted, found, first = sorted(set(numbers)), dict[int, dict[str, str]](), 0
    for index in range(reader.num_record_batches):
        if not wanted:
            break
        batch = read_batch(reader, index, path)
        if batch.schema != DOCUMENTS_SCHEMA:
            raise DamageError(f"{path}: its columns are not those of documents")
        at = bisect_left(wanted, first + batch.num_rows)
        here, wanted = wanted[:at], wanted[at:]
        rows = batch.take(pa.array([number - first for number in here], pa.int64())).to_pylist()
        found |= zip(here, rows, strict=True)
        first += batch.num_rows
    return found
