"""What all readers share: opening compressed files, cutting a file into records, and what to do with bad ones."""

from __future__ import annotations

import bz2
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import pyarrow as pa

from data_prep.common.errors import UserError
from data_prep.readers.documents import Document

BLOCK = 1 << 20
CONTEXT = 256  # bytes that an opening of a record, with what is looked at before and after it, never exceeds
LARGEST_DOCUMENT = 1 << 30
COMPRESSED = (".gz", ".bz2", ".zst")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BZ2_STREAM = re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59")

Errors = Literal["fail", "replace", "skip"]


@dataclass(frozen=True)
class Span:
    """A part of a file that one worker reads: the records that begin in it."""

    path: str
    start: int
    end: int

    def at(self, offset: int) -> str:
        """Names a place in it, for messages."""
        if not self.path.endswith(COMPRESSED):
            return f"{self.path}: byte {offset:,}"
        streams = f" in the streams from byte {self.start:,} on" if self.start else ""
        return f"{self.path}: byte {offset:,} of the uncompressed text{streams}"


@dataclass
class Problems:
    """What is wrong with the input, and what the user wants done about it."""

    policy: Errors
    num_replaced: int = 0
    skipped: list[str] = field(default_factory=list)

    def decode(self, data: bytes, span: Span, offset: int) -> str | None:
        """Text from UTF-8; None where the document is to be skipped."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            if self.policy == "replace":
                self.num_replaced += 1
                return data.decode(errors="replace")
            bad = data[error.start : error.start + 4].hex(" ")
            self.bad(f"{span.at(offset + error.start)}: not UTF-8 ({bad})", "--errors replace reads on with U+FFFD")
            return None

    def clean(self, text: str, where: str) -> str | None:
        """Text that can be written: lone surrogates, which JSON can spell, are no characters."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.policy == "replace":
                self.num_replaced += 1
                return text.encode(errors="replace").decode()
            self.bad(f"{where}: half a surrogate pair (U+{ord(text[error.start]):04X})", "--errors replace writes '?'")
            return None
        return text

    def bad(self, what: str, cure: str = "") -> None:
        """A document that cannot be read: stops the run, or counts and lists it."""
        if self.policy != "skip":
            raise UserError(f"{what}\n{cure + '; ' if cure else ''}--errors skip leaves the document out and lists it")
        self.skipped.append(what)


@dataclass(frozen=True)
class Options:
    """What readers need to know."""

    problems: Problems
    text_field: str = "text"


@dataclass(frozen=True)
class Reader:
    """A format: how to recognise it, how to divide it among workers, how to read it."""

    name: str
    about: str
    detect: Callable[[str, bytes], bool]
    """whether a file is of this format, from its name (in small letters, without .gz and the like) and first bytes"""
    read: Callable[[Span, Options], Iterator[Document]]
    spans: Callable[[Path, int], list[Span]]
    """divides a file into parts of about so many bytes of text"""
    has_sentences: bool = False
    """whether the passages are sentences already"""


def whole(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file that has to be read from its beginning."""
    size = path.stat().st_size
    return [Span(str(path), 0, size)] if size else []


def ranges(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file that can be read from anywhere, unless it is compressed."""
    if path.suffix in COMPRESSED:
        return whole(path, span_bytes)
    size = path.stat().st_size
    return [Span(str(path), at, min(at + span_bytes, size)) for at in range(0, size, span_bytes)]


def bz2_ranges(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file that is plain or in many bz2 streams, for records that need nothing before their opening."""
    if path.suffix != ".bz2":
        return ranges(path, span_bytes)
    size, step = path.stat().st_size, max(1, span_bytes // 4)
    return [Span(str(path), at, min(at + step, size)) for at in range(0, size, step)]


def decompressed(path: Path) -> Iterator[bytes]:
    """The content of a file, a block at a time; .gz, .bz2 and .zst are expanded."""
    try:
        with pa.input_stream(str(path), compression="detect" if path.suffix in COMPRESSED else None) as stream:
            while block := stream.read(BLOCK):
                yield block
    except (OSError, pa.ArrowInvalid) as error:
        if path.suffix in COMPRESSED and not isinstance(error, (FileNotFoundError, PermissionError)):
            raise UserError(f"{path}: truncated or damaged {path.suffix}: {error}") from error
        raise UserError(f"{path}: cannot be read: {error}") from error


def read_head(path: Path, size: int = 1 << 14) -> bytes:
    """The first bytes of a file's content."""
    head = b""
    for block in decompressed(path):
        head += block
        if len(head) >= size:
            break
    return head.removeprefix(BYTE_ORDER_MARK)[:size]


def records(span: Span, opening: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
    """The records that begin in `span`, with their offsets in the (uncompressed) file.

    A record begins where `opening` matches with its end, and goes on to the next such place or the end of the file.
    Nothing that follows a match may undo it.
    The beginning of a file begins a record too, whatever it is, so that all of a file is in some record.
    """
    buffer, base, searched = bytearray(), 0, 0
    first = 0 if span.path.endswith(COMPRESSED) else span.start
    start: int | None = None  # where the record that is being read begins in the buffer
    for block, offset, limit in _blocks(span):
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
                yield base + start, bytes(buffer[start:at])
            start = at
            if base + at >= limit:
                return
        if start is None and base + len(buffer) - CONTEXT >= limit:
            return  # no record begins in the span
        drop = max(0, len(buffer) - 2 * CONTEXT) if start is None else start
        del buffer[:drop]
        base, searched, start = base + drop, len(buffer), None if start is None else 0
        if searched > LARGEST_DOCUMENT:
            raise UserError(f"{span.at(base)}: a record of more than {LARGEST_DOCUMENT >> 20} MB; cut it up")
    if start is not None:
        yield base, bytes(buffer)


Blocks = Iterator[tuple[bytes, int, int]]
"""Blocks with their offsets and the offset, as far as known, at which the span ends; an empty one is the last"""


def _blocks(span: Span) -> Blocks:
    """A span and what follows it."""
    path = Path(span.path)
    if path.suffix == ".bz2":
        yield from _bz2_blocks(path, span)
    elif path.suffix in COMPRESSED:
        at = 0
        for block in decompressed(path):
            yield block, at, sys.maxsize
            at += len(block)
        yield b"", at, sys.maxsize
    else:
        yield from _plain_blocks(path, span)


def _plain_blocks(path: Path, span: Span) -> Blocks:
    try:
        with path.open("rb") as file:
            at = max(0, span.start - CONTEXT)
            file.seek(at)
            while block := file.read(BLOCK):
                yield block, at, span.end
                at += len(block)
            yield b"", at, span.end
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _bz2_blocks(path: Path, span: Span) -> Blocks:
    """The streams that begin in the span, then those after it. Offsets count from the first of them."""
    stream: int | None = None
    try:
        with path.open("rb") as file:
            stream = _next_bz2_stream(file, span)
            if stream is None:
                return
            file.seek(stream)
            at, limit, data, decompressor = 0, 0, b"", bz2.BZ2Decompressor()
            while not decompressor.eof:
                if not data and decompressor.needs_input and not (data := file.read(1 << 16)):
                    raise OSError("it does not end")
                block = decompressor.decompress(data, BLOCK)
                data = b""
                if stream < span.end:
                    limit = at + len(block)
                if block:
                    yield block, at, limit
                    at += len(block)
                if decompressor.eof and (data := decompressor.unused_data or file.read(1 << 16)):
                    stream, decompressor = file.tell() - len(data), bz2.BZ2Decompressor()
            yield b"", at, limit
    except OSError as error:
        if error.errno is not None:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        raise UserError(f"{path}: truncated or damaged .bz2: the stream at byte {stream or 0:,}: {error}") from error


def _next_bz2_stream(file: BinaryIO, span: Span) -> int | None:
    """Where the first bz2 stream that begins in the span does; a file begins with one, or is none."""
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
