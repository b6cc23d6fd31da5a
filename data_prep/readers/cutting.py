"""Reads files, compressed or not: cuts them into spans for workers and spans into records, and looks at their two ends.

The first bytes of the content tell the format, and a key of both ends changes with the content.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data_prep.common.files import BLOCK, readable
from data_prep.readers.compression import KEEPS, expanded
from data_prep.readers.reader import COMPRESSED, Problems, Span, UnreadableError

CONTEXT = 256  # bytes that an opening of a record, with what is looked at before and after it, never exceeds
LARGEST_DOCUMENT = 1 << 27  # bytes: a worker takes ten times that to cut a document into sentences, 1.4 GB
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BZ2_STREAM = re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59")
# Blocks with their offsets and the offset, as far as it is known, at which the span ends; an empty block is the last.
Blocks = Iterator[tuple[bytes, int, int]]


def whole(path: Path, span_bytes: int) -> list[Span]:
    """Makes one span of a file that has to be read from its beginning, none of an empty one."""
    return _divide(path, sys.maxsize)


def ranges(path: Path, span_bytes: int) -> list[Span]:
    """Divides a file that can be read from anywhere; a compressed one stays whole."""
    if path.suffix in COMPRESSED:
        return whole(path, span_bytes)
    return _divide(path, max(span_bytes, len(BYTE_ORDER_MARK) + 1))  # the first holds what follows the mark


def bz2_ranges(path: Path, span_bytes: int) -> list[Span]:
    """Divides a file that is plain or in many bz2 streams, for records that need nothing before their opening."""
    return _divide(path, max(1, span_bytes // 4)) if path.suffix == ".bz2" else ranges(path, span_bytes)


def _divide(path: Path, step: int) -> list[Span]:
    """Makes spans of so many bytes of a file that was there a moment ago."""
    with readable(path, UnreadableError):
        size = path.stat().st_size
    return [Span(str(path), at, min(at + step, size)) for at in range(0, size, step)]


def read_content(path: Path, size: int = 0) -> Iterator[bytes]:
    """Yields the content of a file a block at a time; .gz, .bz2, .xz and .zst are expanded.

    Raises UnreadableError where the file is damaged, or smaller than it is known to be.
    """
    return (block for block, _, _ in _blocks(Span(str(path), 0, size)) if block)


def _check_end(file: BinaryIO, path: Path, end: int) -> None:
    """Raises UnreadableError where a file ends before a span of it does: its size was looked up when the run began."""
    if (size := os.fstat(file.fileno()).st_size) < end:
        what = f"{path}: {size:,} bytes: it has become shorter since the run began"
        raise UnreadableError(what, f"begin anew; {KEEPS}")


def records(
    span: Span, opening: re.Pattern[bytes], problems: Problems, closing: re.Pattern[bytes]
) -> Iterator[tuple[int, bytes]]:
    """Yields the records that begin in a span, with their offsets in the file as it is when it is not compressed.

    A record begins where the group of `opening` does, and goes on to the next such place or the end of the file.
    Nothing that follows a match may undo it.
    The beginning of a file begins a record too, whatever it is, so that all of a file is in some record.
    The record before a damage is whole if it ends in `closing`, and is lost otherwise.
    """
    buffer, base, searched = bytearray(), 0, 0  # base is where the buffer begins
    first = 0 if span.path.endswith(COMPRESSED) else span.start
    start: int | None = None  # where the record that is being read begins in the buffer
    try:
        for block, offset, limit in _blocks(span):
            base = offset - len(buffer)
            if block and not span.start and offset == 0 < limit:
                start = len(BYTE_ORDER_MARK) if block.startswith(BYTE_ORDER_MARK) else 0
            buffer += block
            found = (match.start(1) for match in opening.finditer(buffer, max(0, searched - 2 * CONTEXT)))
            for at in (at for at in found if base + at >= first and (start is None or at > start)):
                if start is not None:
                    yield base + start, bytes(memoryview(buffer)[start:at])  # copied once
                start = at
                if base + at >= limit:
                    return
            if start is None and base + len(buffer) - CONTEXT >= limit:
                return  # no record begins in the span
            if start is not None and len(buffer) - start > LARGEST_DOCUMENT:
                problems.leave_document_out(f"{span.name_place(base + start)}: {too_large('a record')}", "cut it up")
                start = None
            drop = max(0, len(buffer) - 2 * CONTEXT) if start is None else start
            del buffer[:drop]
            base, searched, start = base + drop, len(buffer), None if start is None else 0
    except UnreadableError:
        if start is not None and closing.search(buffer, max(0, len(buffer) - CONTEXT)):
            yield base, bytes(buffer)
        raise
    if start is not None:
        yield base, bytes(buffer)


def decode_element(record: bytes, end: int, tag: bytes, span: Span, offset: int, problems: Problems) -> str | None:
    """Decodes a record up to its closing tag, which is at `end`; None where it is left out.

    What stands between the tag and the next record is listed as lost.
    """
    if end < 0:
        problems.leave_document_out(f"{span.name_place(offset)}: no {tag.decode()}: the file is cut short or broken")
        return None
    end += len(tag)
    if (after := record[end:].strip()) not in (b"", b"</mediawiki>"):
        problems.leave_document_out(f"{span.name_place(offset + end)}: text after {tag.decode()}: {after[:40]!r}")
    return problems.decode(record[:end], span, offset)


def too_large(what: str) -> str:
    """Says that something is larger than a document may be."""
    return f"{what} of more than {LARGEST_DOCUMENT >> 20} MB"


def _blocks(span: Span) -> Blocks:
    """Yields a span and what follows it, since its last record may end beyond it.

    A plain file is read from a little before the span, where an opening may begin. Of a compressed one the streams that
    begin in the span are read, then those after them, and offsets count from the first of them.
    """
    path, at, limit = Path(span.path), max(0, span.start - CONTEXT), span.end
    with readable(path, UnreadableError), path.open("rb") as file:
        if path.suffix in COMPRESSED:
            at = limit = 0
            if (first := _next_stream(file, span)) is not None:
                file.seek(first)
                for block, stream in expanded(file, path, BLOCK):
                    limit = at + len(block) if stream < span.end else limit
                    yield block, at, limit
                    at += len(block)
        else:
            file.seek(at)
            while block := file.read(BLOCK):
                yield block, at, limit
                at += len(block)
        _check_end(file, path, span.end)
        yield b"", at, limit


def _next_stream(file: BinaryIO, span: Span) -> int | None:
    """Finds where the first stream of the span begins; only .bz2 has spans that begin later than the file."""
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


EDGE = 1 << 16  # bytes at each end of a file that its key is made of
HEAD = 1 << 14  # bytes of the content by which a format is known


class Ends(NamedTuple):
    """What the two ends of a file tell: its first bytes, its key, and whether it is damaged."""

    head: bytes
    """The first bytes of the content, without a byte-order mark."""
    content: str
    """The key of the content, which stays when the file is copied or touched."""
    is_damaged: bool = False
    """Whether the head ends where the file is damaged."""


def read_ends(path: str | Path, size: int, most: int = HEAD) -> Ends:
    """Reads the two ends of a file of a size that is known; raises UnreadableError where it cannot be opened or read.

    The head has `most` bytes, which are not more than `EDGE`.
    """
    is_compressed = str(path).endswith(COMPRESSED)
    with readable(path, UnreadableError), open(path, "rb", buffering=HEAD if is_compressed else 0) as file:
        head, is_damaged = file.read(EDGE), False
        key = hashlib.sha256(b"%d " % size + head)
        if size > len(head):
            file.seek(max(len(head), size - EDGE))
            key.update(file.read(EDGE))
        if is_compressed:
            file.seek(0)
            head, is_damaged = _expanded_head(file, Path(path), most)
        return Ends(head.removeprefix(BYTE_ORDER_MARK)[:most], key.hexdigest()[:16], is_damaged)


def _expanded_head(file: BinaryIO, path: Path, most: int) -> tuple[bytes, bool]:
    """Expands the beginning of a compressed file; returns it, and whether a damage ends it early."""
    head = b""
    try:
        for block, _ in expanded(file, path, HEAD):
            head += block
            if len(head) >= most + len(BYTE_ORDER_MARK):
                break
    except UnreadableError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise
        return head, True
    return head, False
