"""What all readers share: opening compressed files, cutting a file into records, and what to do with bad ones."""

from __future__ import annotations

import bz2
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa

from data_prep.documents import Document
from data_prep.errors import UserError

BLOCK = 1 << 20
CONTEXT = 64  # bytes that an opening of a record may need to be recognised
LARGEST_DOCUMENT = 1 << 30
COMPRESSED = (".gz", ".bz2", ".zst")
BZ2_STREAM = re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59")

Errors = Literal["fail", "replace", "skip"]


@dataclass(frozen=True)
class Span:
    """A part of a file that one worker reads: the records that begin in it."""

    path: str
    start: int
    end: int


@dataclass
class Problems:
    """What is wrong with the input, and what the user wants done about it."""

    policy: Errors
    num_replaced: int = 0
    skipped: list[str] = field(default_factory=list)

    def decode(self, data: bytes, where: str, offset: int) -> str | None:
        """Text from UTF-8; None where the document is to be skipped."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            if self.policy == "replace":
                self.num_replaced += 1
                return data.decode(errors="replace")
            bad = data[error.start : error.start + 4].hex(" ")
            self.bad(
                f"{where}: byte {offset + error.start:,}: not UTF-8 ({bad})", "--errors replace reads on with U+FFFD"
            )
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
    """whether a file with this name and these first bytes (uncompressed) is of this format"""
    read: Callable[[Span, Options], Iterator[Document]]
    spans: Callable[[Path, int], list[Span]]
    """divides a file into parts of about so many bytes of text"""
    has_sentences: bool = False
    """whether the passages are sentences already"""


def whole(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file that has to be read from its beginning."""
    return [Span(str(path), 0, path.stat().st_size)]


def ranges(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file that can be read from anywhere, unless it is compressed."""
    if path.suffix in COMPRESSED:
        return whole(path, span_bytes)
    size = path.stat().st_size
    return [Span(str(path), at, min(at + span_bytes, size)) for at in range(0, size, span_bytes)]


def bz2_ranges(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file that is plain or in many bz2 streams."""
    if path.suffix != ".bz2":
        return ranges(path, span_bytes)
    size, step = path.stat().st_size, span_bytes // 4
    return [Span(str(path), at, min(at + step, size)) for at in range(0, size, step)]


def decompressed(path: Path) -> Iterator[bytes]:
    """The content of a file, a block at a time; .gz, .bz2 and .zst are expanded."""
    try:
        with pa.input_stream(str(path), compression="detect" if path.suffix in COMPRESSED else None) as stream:
            while block := stream.read(BLOCK):
                yield block
    except (OSError, pa.ArrowInvalid) as error:
        if path.suffix in COMPRESSED:
            raise UserError(f"{path}: truncated or damaged {path.suffix}: {error}") from error
        raise UserError(f"{path}: cannot be read: {error}") from error


def read_head(path: Path, size: int = 1 << 14) -> bytes:
    """The first bytes of a file's content."""
    head = b""
    for block in decompressed(path):
        head += block
        if len(head) >= size:
            break
    return head[:size]


def records(span: Span, opening: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
    """The records that begin in `span`, with their offsets in the (uncompressed) file or stream.

    A record begins where `opening` matches with its end, and goes on to the next such place or the end of the file.
    """
    buffer, base, limit, start, seen = b"", 0, 0, None, 0
    for block, offset, mine in _blocks(span):
        if not buffer:
            base = offset
        buffer += block
        if mine:
            limit = base + len(buffer)
        for match in opening.finditer(buffer, max(0, seen - 2 * CONTEXT)):
            at = match.end()
            if at > len(buffer) - CONTEXT and block:
                break  # the match may look different when more is read
            if base + at < span_start(span) or (start is not None and at <= start):
                continue
            if start is not None:
                yield base + start, buffer[start:at]
                start = None
            if not mine and base + at >= limit:
                return
            start = at
        drop = start if start is not None else max(0, len(buffer) - 2 * CONTEXT)
        buffer, base = buffer[drop:], base + drop
        start = 0 if start is not None else None
        seen = len(buffer)
        if seen > LARGEST_DOCUMENT:
            raise UserError(f"{span.path}: byte {base:,}: a record of more than {LARGEST_DOCUMENT >> 20} MB; cut it up")
    if start is not None and base < limit:
        yield base, buffer


def span_start(span: Span) -> int:
    """The first offset at which a record of the span can begin."""
    return 0 if span.path.endswith(COMPRESSED) else span.start


def _blocks(span: Span) -> Iterator[tuple[bytes, int, bool]]:
    """Blocks with their offsets and whether they are of the span; then what follows it, then an empty one at the end.

    Two line ends stand in for what is before the beginning of a file.
    """
    path = Path(span.path)
    if path.suffix == ".bz2" and (span.start > 0 or span.end < path.stat().st_size):
        yield from _bz2_blocks(path, span)
    elif path.suffix in COMPRESSED:
        yield b"\n\n", -2, True
        at = 0
        for block in decompressed(path):
            yield block, at, True
            at += len(block)
        yield b"", at, True
    else:
        yield from _plain_blocks(path, span)


def _plain_blocks(path: Path, span: Span) -> Iterator[tuple[bytes, int, bool]]:
    try:
        with path.open("rb") as file:
            at = max(0, span.start - CONTEXT)
            file.seek(at)
            if not at:
                yield b"\n\n", -2, True
            while block := file.read(min(BLOCK, span.end - at) if at < span.end else BLOCK):
                yield block, at, at < span.end
                at += len(block)
            yield b"", at, at <= span.end
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _bz2_blocks(path: Path, span: Span) -> Iterator[tuple[bytes, int, bool]]:
    """The streams that begin in the span, then those after it. Offsets count from the first of them."""
    with path.open("rb") as file:
        first = _next_bz2_stream(file.read, file.seek, span.start)
        if first is None or first >= span.end:
            return
        if not first:
            yield b"\n\n", -2, True
        file.seek(first)
        stream_at, at, decompressor, data = first, 0, bz2.BZ2Decompressor(), b""
        while True:
            if decompressor.eof:
                data = decompressor.unused_data
                stream_at = file.tell() - len(data)
                decompressor = bz2.BZ2Decompressor()
            if not data and not (data := file.read(1 << 16)):
                break
            try:
                block = decompressor.decompress(data)
            except OSError as error:
                raise UserError(f"{path}: damaged .bz2: the stream at byte {stream_at:,}: {error}") from error
            data = b""
            if block:
                yield block, at, stream_at < span.end
                at += len(block)
        if not decompressor.eof and stream_at < file.tell():
            raise UserError(f"{path}: truncated or damaged .bz2: the stream at byte {stream_at:,} does not end")
        yield b"", at, stream_at < span.end


def _next_bz2_stream(read: Callable[[int], bytes], seek: Callable[[int], int], start: int) -> int | None:
    """Where the first bz2 stream at or after `start` begins."""
    seek(start)
    tail, at = b"", start
    while block := read(BLOCK):
        if match := BZ2_STREAM.search(tail + block):
            return at - len(tail) + match.start()
        tail, at = (tail + block)[-9:], at + len(block)
    return None
