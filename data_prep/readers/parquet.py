"""Parquet with a text column, as Wikipedia and BookCorpus are published today."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.documents import Document
from data_prep.errors import UserError
from data_prep.readers.base import Options, Reader, Span
from data_prep.readers.jsonlines import ID_FIELDS, paragraphs

BATCH_ROWS = 1000


def read(span: Span, options: Options) -> Iterator[Document]:
    """A span counts row groups, not bytes."""
    name, file = Path(span.path).name, _open(span.path)
    columns = file.schema_arrow
    if options.text_field not in columns.names:
        known = ", ".join(columns.names)
        raise UserError(f"{span.path}: no column {options.text_field!r}; there is: {known}. Name it with --text-field")
    kind = columns.field(options.text_field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(
            f"{span.path}: the column {options.text_field!r} is {kind}, not text. Name it with --text-field"
        )
    id_field = next((field for field in ID_FIELDS if field in columns.names), None)
    wanted = [field for field in (options.text_field, "title", id_field) if field in columns.names]
    for group in range(span.start, span.end):
        row = 0
        try:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=wanted, use_threads=False):
                for content in batch.to_pylist():
                    given = f"{name}:{group}:{row}" if id_field is None else str(content[id_field])
                    yield Document(given, content.get("title") or "", paragraphs(content[options.text_field] or ""))
                    row += 1
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{span.path}: row group {group}: damaged: {error}") from error


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a whole Parquet file: {error}") from error


def spans(path: Path, span_bytes: int) -> list[Span]:
    """A span for each row group."""
    return [Span(str(path), group, group + 1) for group in range(_open(str(path)).num_row_groups)]


READER = Reader(
    name="parquet",
    about="Parquet with a text column",
    detect=lambda name, head: head.startswith(b"PAR1"),
    read=read,
    spans=spans,
)
