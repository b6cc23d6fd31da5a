"""Reads and writes Arrow files: they appear whole or not at all, and what is damaged is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError
from data_prep.common.files import FileRecord, replacing

UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, MemoryError, TypeError, OverflowError)
"""Exceptions that pyarrow raises for a file that is no whole Arrow file."""


class Lists(NamedTuple):
    """Lists of numbers, stored one after another, as Arrow stores them."""

    values: Array  # the numbers of all lists
    ends: Array  # where every list ends in them


def make_schema(**kinds: pa.DataType) -> pa.Schema:
    """Makes the schema of a table in which every column has a value in every row."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def make_list_type(kind: pa.DataType) -> pa.ListType:
    """Makes the type of lists in which no item lacks a value."""
    return pa.list_(pa.field("item", kind, nullable=False))


def write_batches(
    folder: Path, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], compression: str | None = None
) -> FileRecord:
    """Writes an Arrow file a record batch at a time, so that it is never in memory as a whole; returns its record."""
    rows, options = 0, pa.ipc.IpcWriteOptions(compression=compression)
    with replacing(folder / name) as file, pa.ipc.new_file(file, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return FileRecord.from_file(folder, name, rows)


def make_example_batch(
    schema: pa.Schema, pieces: Lists, positions: Array, labels: Lists, *others: Array
) -> pa.RecordBatch:
    """Makes a record batch of examples from flat arrays.

    `positions` has the place in its example of every piece of `labels`; `others` are the columns that remain.
    """
    item = schema.field("masked").type.value_type
    masked = pa.StructArray.from_arrays([pa.array(positions), pa.array(labels.values)], fields=list(item))
    columns = [
        pa.ListArray.from_arrays(
            make_list_offsets(pieces.ends), pa.array(pieces.values), type=schema.field("pieces").type
        ),
        pa.ListArray.from_arrays(make_list_offsets(labels.ends), masked, type=schema.field("masked").type),
        *(pa.array(column, field.type) for column, field in zip(others, list(schema)[2:], strict=True)),
    ]
    return pa.record_batch(columns, schema=schema)


def make_list_offsets(ends: Array) -> pa.Array:
    """Turns the ends of lists into the offsets that Arrow has for lists, which begin with a zero."""
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    return pa.array(offsets)


@contextmanager
def name_damage(path: Path, what: str) -> Iterator[None]:
    """Turns into a DamageError, which names the file, whatever is raised where it is not what it claims to be."""
    try:
        yield
    except DamageError:
        raise
    except UNREADABLE as error:
        raise DamageError(f"{path}: {what}: {error}") from error


def map_batches(path: Path) -> pa.RecordBatchFileReader:
    """Maps an Arrow file into memory without reading it; raises DamageError if it is not whole."""
    with name_damage(path, "not a whole Arrow file"):
        if not path.is_file():
            raise DamageError(f"{path}: missing, or no file")
        return pa.ipc.open_file(pa.memory_map(str(path)))


def read_batch(reader: pa.RecordBatchFileReader, index: int, path: Path, full: bool = True) -> pa.RecordBatch:
    """Takes a record batch of a mapped file; raises DamageError unless its columns lie within the file.

    `full` also checks the offsets within columns, which takes half a millisecond for a shard of 75 MB.
    """
    with name_damage(path, "damaged"):
        batch = reader.get_batch(index)
        batch.validate(full=full)
        if nulls := sum(map(_nulls, batch.columns)):
            raise DamageError(f"{path}: damaged: {nulls:,} values that are none")
        return batch


def _nulls(column: pa.Array) -> int:
    """Counts the values of a column that are none, within lists and structures too; Cloze writes no such value."""
    inner = [column.values] if pa.types.is_list(column.type) else []
    if pa.types.is_struct(column.type):
        inner = [column.field(index) for index in range(column.type.num_fields)]
    return int(column.null_count) + sum(map(_nulls, inner))


def read_shard(path: Path, full: bool = False) -> pa.RecordBatch:
    """Maps a shard into memory; raises DamageError where it is none.

    Unless `full`, its offsets are not checked: the caller must check them before reading rows by them.
    """
    reader = map_batches(path)
    with name_damage(path, "not a whole Arrow file"):
        count = reader.num_record_batches
    if count != 1:
        raise DamageError(f"{path}: {count} record batches; a shard has one")
    return read_batch(reader, 0, path, full)
