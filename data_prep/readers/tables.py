"""Tables in TSV, CSV, JSON lines and Parquet, compressed or not, with the place of every row for messages."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.common.errors import UserError
from data_prep.readers.cutting import read_content
from data_prep.readers.foreign import not_text
from data_prep.readers.formats.csv import parse_rows
from data_prep.readers.formats.jsonl import parse_object
from data_prep.readers.reader import UnreadableError, unpacked_name

HEAD = 4096  # bytes that tell what a file is


@dataclass(frozen=True)
class TextTable:
    """The rows of a file, all of them as text."""

    path: Path
    names: tuple[str, ...]
    """The names of the columns."""
    columns: Sequence[Sequence[str | None]]
    """The values of every column; None where a format can say that there is none."""
    lines: Sequence[int]
    """The line on which every row begins; in Parquet the number of the row."""
    skipped: int = 0
    """Rows that were left out, since they were too short."""

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, key: str | int) -> list[str]:
        """The values of a column that is given by its name, or by its number, from the end where that is negative."""
        if isinstance(key, str) and key not in self.names:
            raise UserError(f"{self.path}: no column {key!r}; there is {', '.join(map(repr, self.names))}")
        if isinstance(key, str) and self.names.count(key) > 1:
            raise UserError(f"{self.path}: two columns have the name {key!r}; rename one")
        at = self.names.index(key) if isinstance(key, str) else key
        if at >= len(self.names):
            there = f"{_count(len(self.names))} where at least {at + 1} are needed"
            raise UserError(f"{self.path}:1: {there}: {', '.join(self.names)}")
        if None in self.columns[at]:
            self.fail(self.columns[at].index(None), f"no value of {self.names[at]!r}")
        return cast(list[str], self.columns[at])

    def read_texts(self, key: str, fault: str) -> list[str]:
        """Returns the values of a column; raises UserError with a fault for one that is blank."""
        values = self.column(key)
        if (row := next((row for row, text in enumerate(values) if not text.strip()), None)) is not None:
            self.fail(row, fault)
        return values

    def list_columns(self, name: str) -> list[Sequence[str | None]]:
        """Lists the columns of this name, none or one in a sound table."""
        return [column for own, column in zip(self.names, self.columns, strict=True) if own == name]

    def fail(self, row: int, fault: str) -> NoReturn:
        """Raises UserError for what is wrong with a row."""
        raise UserError(f"{self.path}:{self.lines[row]}: {fault}")


def read_table(path: Path) -> TextTable:
    """Reads a file in the format that its name ends in; the names of the columns stand in its first line."""
    readers: dict[str, Callable[[Path], TextTable]] = {
        ".tsv": read_tsv,
        ".csv": read_csv,
        ".jsonl": read_jsonl,
        ".parquet": read_parquet,
    }
    ending = Path(unpacked_name(path)).suffix.lower()
    if ending not in readers:
        raise UserError(f"{path}: the name ends in none of {', '.join(readers)}, so its format is not known")
    return readers[ending](path)


def read_tsv(path: Path, names: Sequence[str] | None = None, *, skip_short: bool = False) -> TextTable:
    """Reads columns parted by tabulators, where a quotation mark is a character like others.

    `names` are those of the columns of a file whose first line does not have them. `skip_short` leaves out rows with
    fewer columns, and counts them.
    """
    text = read_text(path)
    is_single = "\t" not in text.partition("\n")[0]  # where an empty line is a row
    lines = (text.removesuffix("\n") if is_single else text.rstrip("\n")).split("\n")
    first = 2 if names is None else 1
    names = lines.pop(0).split("\t") if names is None else names
    widths = [line.count("\t") + 1 for line in lines]
    kept = [row for row, width in enumerate(widths) if width >= len(names) or not skip_short]
    # dividing all of the text at once is faster than dividing each line
    cells = "\t".join([lines[row] for row in kept]).split("\t")
    numbers = [first + row for row in kept]
    return _make_table(path, names, cells, [widths[row] for row in kept], numbers, len(lines) - len(kept))


def read_csv(path: Path) -> TextTable:
    """Reads columns parted by commas, semicolons or tabs, where a field in quotation marks may hold all of these."""
    (_, names), *rows = parse_csv(io.StringIO(read_text(path), newline=""), str(path))
    cells = [value for _, row in rows for value in row]
    return _make_table(path, names, cells, [len(row) for _, row in rows], [line for line, _ in rows])


def parse_csv(text: Iterable[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows of lines of CSV, each with the line on which it begins; empty lines are left out.

    `name` is what messages call the file.
    """
    for line, _, row in parse_rows(text):
        if isinstance(row, csv.Error):
            raise UserError(f"{name}:{line}: not a row of CSV: {row}")
        yield line, row


def _make_table(
    path: Path, names: Sequence[str], cells: list[str], widths: list[int], lines: list[int], skipped: int = 0
) -> TextTable:
    """Makes a table of the values of all rows, one after another; all rows must be as wide as there are names."""
    if not widths:
        raise UserError(f"{path}: no rows after the names of the columns ({', '.join(names)})")
    columns = [cells[at :: len(names)] for at in range(len(names))]
    table = TextTable(path, tuple(names), columns, lines, skipped)
    for row, width in enumerate(widths):
        if width != len(names):
            table.fail(row, f"{_count(width)} where there are {len(names)}: {', '.join(names)}")
    return table


def _count(columns: int) -> str:
    return f"{columns} column{'s' * (columns != 1)}"


def read_jsonl(path: Path) -> TextTable:
    """Reads one JSON object a line; the columns are all keys that there are."""
    lines, objects = zip(*read_objects(path), strict=True)
    names = tuple(dict.fromkeys(itertools.chain.from_iterable(objects)))
    return TextTable(path, names, [[_spelled(found.get(name)) for found in objects] for name in names], lines)


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields one JSON object a line, with the number of its line, as the file is read; empty lines are left out."""
    found = None
    for line, text in enumerate(decode_lines(_split_lines(_read_blocks(path)), str(path)), 1):
        if text.strip():
            with told_at(f"{path}:{line}"):
                found = parse_object(text)
            yield line, found
    if found is None:
        raise UserError(f"{path}: the file is empty")


@contextmanager
def told_at(where: str) -> Iterator[None]:
    """Puts the place before what is wrong with it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _spelled(value: Any) -> str | None:
    """Spells a value of JSON as text; of a list or an object nobody can say what it would mean."""
    if isinstance(value, str):
        return value
    return None if value is None or isinstance(value, list | dict) else json.dumps(value)


def read_parquet(path: Path) -> TextTable:
    """Reads Parquet; numbers are spelled as text."""
    with open_parquet(path) as file:
        names = [field.name for field in file.schema_arrow if _is_plain(field.type)]
        columns = [column.cast(pa.large_string()).to_pylist() for column in file.read(names).columns]
        rows = file.metadata.num_rows
    if not rows:
        raise UserError(f"{path}: no rows")
    return TextTable(path, tuple(names), columns, range(1, rows + 1))


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file, for as long as it is read; UserError where that shows that it is none, or damaged."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole Parquet file: {error}") from error


def _is_plain(kind: pa.DataType) -> bool:
    """Tells whether the values of a column can be spelled as text."""
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def not_utf8(path: Path | str, line: int, head: bytes, error: UnicodeDecodeError) -> UserError:
    """The error for a line whose bytes are no text; the first bytes of the file tell whether it is a text at all."""
    if foreign := not_text(head):
        cure = foreign.cure_for(Path(path))
        return UserError(f"{path}: {foreign.what}, which is not read here" + f"; {cure}" * bool(foreign.cure))
    cure = "convert it: iconv -f LATIN1 -t UTF-8, if it is Latin-1"
    return UserError(f"{path}:{line}: not UTF-8 ({error.reason}); {cure}")


def read_text(path: Path) -> str:
    """Reads a text file that is not empty, without its byte-order mark and with `\\n` alone at the ends of lines."""
    content = b"".join(_read_blocks(path))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, 1 + content.count(b"\n", 0, error.start), content[:HEAD], error) from error
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    return text.replace("\r\n", "\n")


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields the text of every line, without its line end and a byte order mark; `name` is what messages call them."""
    head = b""
    for number, line in enumerate(lines, 1):
        head = head or line[:HEAD]
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(name, number, head, error) from error
        yield text.removesuffix("\n").removesuffix("\r")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a content that comes in blocks, without their ends."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _read_blocks(path: Path) -> Iterator[bytes]:
    """Yields the content of a file, expanded; raises UserError where it cannot be read."""
    try:
        yield from read_content(path)
    except UnreadableError as error:
        is_missing = isinstance(error.__cause__, FileNotFoundError)
        raise UserError(f"{path}: no such file" if is_missing else error.what) from error
