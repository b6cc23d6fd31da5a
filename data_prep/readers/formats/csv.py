"""Reads tables as CSV or TSV: a document a row, its text in one column (`text` unless --text-field says otherwise).

CSV is that of RFC 4180, with line breaks in quoted fields; commas, semicolons or tabs part the fields, as the header
shows. TSV has no quoting but of whole fields. `id` (or `_id`, `docid`) and `title` are taken where they are there.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_prep.readers.cutting import BYTE_ORDER_MARK, LARGEST_DOCUMENT, read_content, whole
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.formats.jsonl import ID_FIELDS
from data_prep.readers.formats.wikiextractor import paragraphs
from data_prep.readers.reader import Document, Options, Span, UnreadableError, unpacked_name

LONGEST_NAME = 60  # characters of a name of a column; what is longer is likely a text
UNCLOSED = "in CSV a field with quotation marks is enclosed in such, and each within it is doubled"
NO_HEADER = "give the table a first line with the names of its columns: it seems to have none"
PARTED_BY_TABS = "in TSV tabs part the fields, so that no field has a tab or a line break in it"

csv.field_size_limit(LARGEST_DOCUMENT)


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads a document of every row below the header."""
    path, field = Path(span.path), options.text_field
    is_tsv = unpacked_name(path).lower().endswith(".tsv")
    kind, cure = ("TSV", PARTED_BY_TABS) if is_tsv else ("CSV", UNCLOSED)
    rows = parse_rows(_read_lines(span), is_tsv)
    _, _, names = next(rows, (0, 0, []))
    if isinstance(names, csv.Error) or (field not in names and any(len(name) > LONGEST_NAME for name in names)):
        raise UnreadableError(f"{path}: no line with the names of its columns", NO_HEADER)
    if names and field not in names:
        _, _, first = next(rows, (0, 0, []))
        shown = [] if isinstance(first, csv.Error) else first[: len(names)]
        raise options.explain_missing_text(path, dict(itertools.zip_longest(names, shown)))
    if names.count(field) > 1:
        raise UnreadableError(f"{path}: two columns have the name {field!r}", "rename one")
    for number, last, row in rows:
        where = f"{path}: line {number:,}"
        if isinstance(row, csv.Error):
            options.problems.leave_document_out(f"{where}: not a row of {kind} up to line {last:,}: {row}", cure)
        elif len(row) != len(names):
            options.problems.leave_document_out(f"{where}: {len(row)} fields, the header has {len(names)}", cure)
        else:
            values = dict(zip(names, row, strict=True))
            text = options.problems.decode(_encode_field(values[field]), Span(where, 0, 0), 0)
            if text is not None:
                title = _encode_field(values.get("title", "")).decode(errors="replace")
                given = next((values[name] for name in ID_FIELDS if values.get(name)), f"{path.name}:{number}")
                yield Document(_encode_field(given).decode(errors="replace"), title, paragraphs(text, title))


def _encode_field(text: str) -> bytes:
    """Restores the bytes of a field in the file, which may not be UTF-8."""
    return text.encode(errors="surrogateescape")


def parse_rows(text: Iterable[str], is_tsv: bool = False) -> Iterator[tuple[int, int, list[str] | csv.Error]]:
    """Yields the rows of lines of CSV or TSV, one in memory at a time, or what is wrong with one; each with the numbers
    of its first and its last line. Empty lines are left out."""
    lines = iter(text)
    header = next(lines, "")
    # spreadsheets of many languages write semicolons; what stands in quotation marks parts nothing
    delimiter = "\t" if is_tsv else max(",;\t", key="".join(header.split('"')[::2]).count)
    rows = itertools.chain([header], lines)
    table = csv.reader(rows, delimiter=delimiter, quoting=csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL, strict=True)
    while True:
        first = table.line_num + 1
        try:
            if row := next(table):
                yield first, table.line_num, [_unquote(value) for value in row] if is_tsv else row
        except csv.Error as error:
            yield first, table.line_num, error
        except StopIteration:
            return


def _unquote(value: str) -> str:
    """Takes the quotation marks off a field of TSV that is enclosed in them, where those within are doubled."""
    inner = value[1:-1]
    enclosed = len(value) > 1 and value[0] == value[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if enclosed else value


def _read_lines(span: Span) -> Iterator[str]:
    """Splits the content of a file into lines with their ends; bytes that are not UTF-8 become surrogates."""
    rest = b""
    for number, block in enumerate(read_content(Path(span.path), span.end)):
        *whole_lines, rest = (rest + (block if number else block.removeprefix(BYTE_ORDER_MARK))).split(b"\n")
        yield from (line.decode(errors="surrogateescape") + "\n" for line in whole_lines)
        if len(rest) > LARGEST_DOCUMENT:
            raise UnreadableError(f"{span.path}: a line of more than {LARGEST_DOCUMENT >> 20} MB", "cut it up")
    if rest:
        yield rest.decode(errors="surrogateescape")


READER = Reader(read, whole, suffixes=(".csv", ".tsv"), order=5, has_fields=True)
