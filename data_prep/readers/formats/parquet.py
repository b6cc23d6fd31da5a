"""Reads Parquet and Arrow files with a text column, as Wikipedia and BookCorpus are published today.

BookCorpus has a sentence on every row and nothing else: there, a document is ROWS of them in their order. An Arrow file
is read as a Parquet file is: its batches of records are its row groups, or all of a stream is one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.common.files import BLOCK
from data_prep.readers import compression, cutting
from data_prep.readers.foreign import Foreign
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.formats.jsonl import ID_FIELDS, WIKI_FIELDS
from data_prep.readers.formats.sentences import are_sentences
from data_prep.readers.formats.wikiextractor import paragraphs, remove_marks
from data_prep.readers.reader import Document, Options, Span, UnreadableError

FILE, STREAM = b"ARROW1\0\0", b"\xff\xff\xff\xff"
"""How files of the two kinds begin."""
END_OF_STREAM = STREAM + bytes(4)


class RecordBatches:
    """The part of pq.ParquetFile's interface that readers use, for an Arrow file; ArrowInvalid if that is cut off."""

    def __init__(self, path: str):
        self._path = path
        with pa.OSFile(path) as file:  # not mapped: a fault of the disk would be the end of the process
            reader = _open_arrow(file)
            self.schema_arrow, self.num_row_groups = reader.schema, getattr(reader, "num_record_batches", 1)
            if isinstance(reader, pa.RecordBatchStreamReader):
                file.seek(file.size() - len(END_OF_STREAM))
                if file.read() != END_OF_STREAM:
                    raise pa.ArrowInvalid("the stream has no end")
        self.schema_arrow.names  # noqa: B018 (raises UnicodeDecodeError for a damaged name)

    def iter_batches(
        self, rows: int, row_groups: Sequence[int], columns: Sequence[str], use_threads: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yields so many rows at a time of some columns; it has no threads."""
        with pa.OSFile(self._path) as file:
            reader = _open_arrow(file)
            is_stream = isinstance(reader, pa.RecordBatchStreamReader)
            for batch in reader if is_stream else map(reader.get_batch, row_groups):
                wanted = batch.select(columns)
                for column in wanted.columns:  # damaged offsets would end the process; bytes need not be UTF-8 here
                    (column.view(AS_BYTES[column.type]) if column.type in AS_BYTES else column).validate(full=True)
                for start in range(0, batch.num_rows, rows):
                    yield wanted.slice(start, rows)


def _open_arrow(file: pa.OSFile) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Opens an Arrow file of either kind."""
    opened = pa.ipc.open_file if file.read(len(FILE)) == FILE else pa.ipc.open_stream
    file.seek(0)
    return opened(file)


def describes_dataset(path: Path) -> bool:
    """Whether a file tells of the Arrow files that `save_to_disk` put beside it, or into folders beside it."""
    names = ("state.json", "dataset_info.json", "dataset_dict.json")
    return path.name in names and any((path.parent / name).exists() for name in (names[0], names[2]))


NOT_WHOLE = Foreign("a Parquet or Arrow file that is not whole", "fetch or write it anew")
AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
ROWS = 1000  # read at once
FAULTS = (pa.ArrowException, OSError, UnicodeDecodeError)


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads the row groups of a span, which counts row groups and not bytes."""
    path = Path(span.path)
    columns = _columns(span.path, options)
    if rows_are_sentences(span.path, options.text_field):
        for place, batch in _batches(span, [options.text_field]):
            texts = (_decode_text(row[options.text_field], span, where, options) for where, row in batch)
            yield Document(f"{path.name}:{place}", "", [line for text in texts for line in paragraphs(text or "", "")])
        return
    id_field = next((field for field in ID_FIELDS if field in columns), None)
    wanted = [field for field in dict.fromkeys((options.text_field, "title", id_field)) if field in columns]
    for _, batch in _batches(span, [str(field) for field in wanted]):
        for where, row in batch:
            text = _decode_text(row[options.text_field], span, where, options)
            if text is None:
                continue
            if set(columns) >= WIKI_FIELDS:
                text = remove_marks(text)
            title = _name(row.get("title"))
            yield Document(_name(row.get(id_field or "")) or f"{path.name}:{where}", title, paragraphs(text, title))


def _batches(span: Span, columns: list[str]) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Yields some rows at a time with their places `row group:row`; texts are bytes, as they may not be UTF-8."""
    for group in range(span.start, span.end):
        at = 0
        try:
            file = _open(span.path)
            _refuse_bomb(span.path, file, group)
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False):
                values = [_values(batch.column(name)) for name in columns]
                rows = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
                yield f"{group}:{at}", [(f"{group}:{at + number}", row) for number, row in enumerate(rows)]
                at += len(rows)
        except FAULTS as error:
            what = f"{span.path}: row group {group}: damaged: {error}"
            raise UnreadableError(what, "--errors skip leaves the rest of the row group out and lists it") from error


def _refuse_bomb(path: str, file: pq.ParquetFile | RecordBatches, group: int) -> None:
    """Raises UnreadableError where a row group says that it expands to far more than a text does.

    It asks for nothing of single columns: where that is damaged, pyarrow ends the process. Arrow files do not say it.
    """
    if isinstance(file, RecordBatches):
        return
    size, packed = file.metadata.row_group(group).total_byte_size, os.stat(path).st_size
    if size > compression.EXPANDS_FREELY + compression.MOST_TIMES * packed:
        what = f"{path}: row group {group}: {size // 10**6:,} MB in a file of {packed:,} bytes, as a bomb does"
        raise UnreadableError(what, "--errors skip leaves the row group out and lists it")


def _values(column: pa.Array) -> list[Any]:
    """Turns a column into Python values, with texts as bytes."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[Any] = (column.cast(pa.large_binary()) if _is_text(column.type) else column).to_pylist()
    return values


def _decode_text(value: bytes | None, span: Span, where: str, options: Options) -> str | None:
    """Decodes the text of a row, where none is an empty one; returns None where the row is to be left out."""
    group, _, row = where.partition(":")
    place = f"{span.path}: row group {group}, row {row}"
    if value is not None and len(value) > cutting.LARGEST_DOCUMENT:
        options.problems.leave_document_out(f"{place}: {cutting.too_large('a document')}", "cut it up")
        return None
    return options.problems.decode(value or b"", Span(place, 0, 0), 0)


def _name(value: Any) -> str:
    """Spells an id or a title of whatever type."""
    return "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _is_text(kind: pa.DataType) -> bool:
    """Tells whether a column of this type has texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())


def _columns(path: str, options: Options) -> list[str]:
    """Names the columns of a file; raises UnreadableError where none has the text."""
    schema = _open(path).schema_arrow
    texts = [field.name for field in schema if _is_text(field.type)]
    if options.text_field in texts:
        return list(schema.names)
    raise options.explain_missing_text(path, dict.fromkeys(schema.names) | next(iter(_first_rows(path, texts)), {}))


def _first_rows(path: str, columns: list[str]) -> list[dict[str, Any]]:
    """Reads these columns of the first rows of a file, where they are not damaged."""
    for group in range(_open(path).num_row_groups):
        with suppress(UnreadableError):
            _, rows = next(_batches(Span(path, group, group + 1), columns), ("", []))
            return [row for _, row in rows]
    return []


@functools.cache
def rows_are_sentences(path: str, text_field: str) -> bool:
    """Tells whether a row of the only column is a sentence and not a document, by what is in the first rows."""
    schema = _open(path).schema_arrow
    if schema.names != [text_field] or not _is_text(schema.field(0).type):
        return False
    lines = [(row[text_field] or b"").decode(errors="replace").strip() for row in _first_rows(path, [text_field])]
    return are_sentences([line for line in lines if line]) and not any("\n" in line for line in lines)


def describe(path: str, text_field: str) -> str:
    """Says that the rows of a file are sentences, where they are."""
    return f", with a sentence a row: {ROWS:,} rows are a document" if rows_are_sentences(path, text_field) else ""


def _open(path: str) -> pq.ParquetFile | RecordBatches:
    """Opens a file, once for all its row groups in a row; raises UnreadableError where it is not whole."""
    try:
        status = os.stat(path)
        return _open_version(path, status.st_size, status.st_mtime_ns)
    except FAULTS as error:
        raise UnreadableError(f"{path}: not a whole file: {error}") from error


@functools.lru_cache(maxsize=1)
def _open_version(path: str, size: int, modified: int) -> pq.ParquetFile | RecordBatches:
    """Opens a Parquet or Arrow file as it is now; not mapped: a fault of the disk would be the end of the process."""
    with open(path, "rb") as start:
        if start.read(8).startswith((FILE, STREAM)):
            return RecordBatches(path)
    file = pq.ParquetFile(path, buffer_size=BLOCK, page_checksum_verification=True)  # where there are any
    file.schema_arrow.names  # noqa: B018 (which may not be UTF-8: better told here)
    return file


def find_fault(path: Path, head: bytes) -> Foreign | None:
    """Tells whether a Parquet or Arrow file cannot be opened."""
    try:
        _open(str(path))
    except UnreadableError:
        return NOT_WHOLE
    return None


def spans(path: Path, span_bytes: int) -> list[Span]:
    """Makes a span of every row group."""
    return [Span(str(path), group, group + 1) for group in range(_open(str(path)).num_row_groups)]


READER = Reader(
    read, spans, (), (b"PAR1",), order=3, is_binary=True, has_fields=True, find_fault=find_fault, describe=describe
)
