"""Cuts files, compressed or not, into spans for workers and spans into records."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_prep.common.files import BLOCK
from data_prep.readers.compression import KEEPS, expanded
from data_prep.readers.reader import COMPRESSED, Problems, Span, UnreadableError

CONTEXT = 256  # bytes that an opening of a record, with what is looked at before and after it, never exceeds
MOST_COUNTED = 1 << 32  # bytes before a span whose lines are counted for a message: a second or two
LARGEST_DOCUMENT = 1 << 27  # bytes: a worker takes ten times that to cut a document into sentences, 1.4 GB
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BZ2_STREAM = re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59")
# Blocks with their offsets and the offset, as far as it is known, at which the span ends; an empty block is the last.
Blocks = Iterator[tuple[bytes, int, int]]


def whole(path: Path, span_bytes: int) -> list[Span]:
    """Makes one span of a file that has to be read from its beginning, none of an empty one."""
    size = _size(path)
    return [Span(str(path), 0, size)] if size else []


def ranges(path: Path, span_bytes: int) -> list[Span]:
    """Divides a file that can be read from anywhere; a compressed one stays whole."""
    if path.suffix in COMPRESSED:
        return whole(path, span_bytes)
    size, step = _size(path), max(span_bytes, len(BYTE_ORDER_MARK) + 1)  # the first holds what follows the mark
    return [Span(str(path), at, min(at + step, size)) for at in range(0, size, step)]


def bz2_ranges(path: Path, span_bytes: int) -> list[Span]:
    """Divides a file that is plain or in many bz2 streams, for records that need nothing before their opening."""
    if path.suffix != ".bz2":
        return ranges(path, span_bytes)
    size, step = _size(path), max(1, span_bytes // 4)
    return [Span(str(path), at, min(at + step, size)) for at in range(0, size, step)]


def _size(path: Path) -> int:
    """Looks up the size of a file that was there a moment ago."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise UnreadableError.of(path, error) from error


def decompressed(path: Path, block_bytes: int = BLOCK, size: int = 0) -> Iterator[bytes]:
    """Yields the content of a file a block at a time; .gz, .bz2 and .zst are expanded.

    Raises UnreadableError where the file is damaged, or smaller than it is known to be.
    """
    try:
        with path.open("rb") as file:
            if path.suffix in COMPRESSED:
                yield from (block for block, _ in expanded(file, path, block_bytes))
            else:
                while block := file.read(block_bytes):
                    yield block
            _check_end(file, path, size)
    except OSError as error:
        raise UnreadableError.of(path, error) from error


def read_head(path: Path, size: int) -> bytes:
    """Reads the first bytes of the content of a file, fewer where it is damaged."""
    head = b""
    with suppress(UnreadableError):
        for block in decompressed(path, size):
            head += block
            if len(head) >= size:
                break
    return head.removeprefix(BYTE_ORDER_MARK)[:size]


def _check_end(file: BinaryIO, path: Path, end: int) -> None:
    """Raises UnreadableError where a file ends before a span of it does: its size was looked up when the run began."""
    if (size := os.fstat(file.fileno()).st_size) < end:
        raise UnreadableError(
            f"{path}: {size:,} bytes: it has become shorter since the run began", f"begin anew; {KEEPS}"
        )


def records(
    span: Span, opening: re.Pattern[bytes], problems: Problems | None = None, closing: re.Pattern[bytes] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yields the records that begin in a span, with their offsets in the file as it is when it is not compressed.

    A record begins where `opening` matches with its end, and goes on to the next such place or the end of the file.
    Nothing that follows a match may undo it.
    The beginning of a file begins a record too, whatever it is, so that all of a file is in some record.
    Where a damage is one of the problems, the record before it is whole if it ends in `closing`, and is lost otherwise.
    """
    buffer, base, searched = bytearray(), 0, 0
    first = 0 if span.path.endswith(COMPRESSED) else span.start
    start: int | None = None  # where the record that is being read begins in the buffer
    blocks = _Blocks(span, problems or Problems("fail"))
    for block, offset, limit in blocks:
        if not buffer:
            base = offset
            if block and not span.start and offset == 0 < limit:
                start = len(BYTE_ORDER_MARK) if block.startswith(BYTE_ORDER_MARK) else 0
        buffer += block
        for match in opening.finditer(buffer, max(0, searched - 2 * CONTEXT)):
            at = match.end()
            if base + at < first or (start is not None and at <= start):
                continue
            if start is not None:
                yield base + start, _cut(buffer, start, at)
            start = at
            if base + at >= limit:
                return
        if start is None and base + len(buffer) - CONTEXT >= limit:
            return  # no record begins in the span
        if start is not None and len(buffer) - start > LARGEST_DOCUMENT:
            blocks.problems.bad(f"{span.at(base + start)}: {too_large('a record')}", "cut it up")
            start = None
        drop = max(0, len(buffer) - 2 * CONTEXT) if start is None else start
        del buffer[:drop]
        base, searched, start = base + drop, len(buffer), None if start is None else 0
    if start is not None and (not blocks.is_cut or (closing and closing.search(buffer, max(0, len(buffer) - CONTEXT)))):
        yield base, bytes(buffer)


@dataclass(frozen=True)
class Line:
    """A place in a file, spelled by the number of its line; the lines before its span are counted only then."""

    span: Span
    offset: int
    first: int
    """The offset of the first record of the span."""
    passed: int
    """How many line ends are between that and the place."""

    def __str__(self) -> str:
        if self.first > MOST_COUNTED:
            return self.span.at(self.offset)
        return f"{self.span.path}: line {1 + self.passed + _line_ends(self.span.path, self.first):,}"


def numbered(span: Span, found: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Line, bytes]]:
    """Adds to the records of a span the lines that they begin in."""
    first, passed = None, 0
    for offset, record in found:
        first = offset if first is None else first
        yield offset, Line(span, offset, first, passed), record
        passed += record.count(b"\n")


@functools.lru_cache(maxsize=1)
def _line_ends(path: str, stop: int) -> int:
    """Counts the line ends in a file before an offset in its expanded content."""
    count = 0
    for block in decompressed(Path(path)) if stop else ():
        count += block[:stop].count(b"\n")
        stop -= len(block)
        if stop <= 0:
            break
    return count


def _cut(buffer: bytearray, start: int, end: int) -> bytes:
    """Copies a part of a buffer once, however large it is."""
    with memoryview(buffer) as view:
        return bytes(view[start:end])


def too_large(what: str) -> str:
    """Says that something is larger than a document may be."""
    return f"{what} of more than {LARGEST_DOCUMENT >> 20} MB"


class _Blocks:
    """The blocks of a span up to its end or to a damage, which is among the problems then."""

    def __init__(self, span: Span, problems: Problems) -> None:
        self.span, self.problems = span, problems
        self.is_cut = False

    def __iter__(self) -> Blocks:
        try:
            yield from _blocks(self.span)
        except UnreadableError as error:
            self.problems.lose(error)
            self.is_cut = True


def _blocks(span: Span) -> Blocks:
    """Yields a span and what follows it, since its last record may end beyond it."""
    path = Path(span.path)
    if path.suffix == ".bz2":
        yield from _bz2_blocks(path, span)
    elif path.suffix in COMPRESSED:
        at = 0
        for block in decompressed(path, BLOCK, span.end):
            yield block, at, sys.maxsize
            at += len(block)
        yield b"", at, sys.maxsize
    else:
        yield from _plain_blocks(path, span)


def _plain_blocks(path: Path, span: Span) -> Blocks:
    """Reads a file that is not compressed, from a little before the span, where an opening may begin."""
    try:
        with path.open("rb") as file:
            at = max(0, span.start - CONTEXT)
            file.seek(at)
            while block := file.read(BLOCK):
                yield block, at, span.end
                at += len(block)
            _check_end(file, path, span.end)
            yield b"", at, span.end
    except OSError as error:
        raise UnreadableError.of(path, error) from error


def _bz2_blocks(path: Path, span: Span) -> Blocks:
    """Reads the bz2 streams that begin in the span, then those after it; offsets count from the first of them."""
    try:
        with path.open("rb") as file:
            first = _next_bz2_stream(file, span)
            if first is None:
                _check_end(file, path, span.end)
                return
            file.seek(first)
            at = limit = 0
            for block, stream in expanded(file, path, BLOCK):
                if stream < span.end:
                    limit = at + len(block)
                yield block, at, limit
                at += len(block)
            _check_end(file, path, span.end)
            yield b"", at, limit
    except OSError as error:
        raise UnreadableError.of(path, error) from error


def _next_bz2_stream(file: BinaryIO, span: Span) -> int | None:
    """Finds where the first bz2 stream of the span begins; the first stream of a file begins where the file does."""
    if not span.start:
        return 0
    file.seek(span.start)
    tail, at = b"", span.start
    while at - len(tail) < span.end and (block := file.read(BLOCK)):
        if match := BZ2_STREAM.search(tail + block):
            found = at - len(tail) + match.start()
            return found if found < span.end else None
        tail, at = (tail + block)[-9:], at + len(block)
    return None
