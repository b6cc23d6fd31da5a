"""Expands .gz, .bz2, .xz and .zst a little at a time: all that comes before a damage, and no bombs.

A compressed file is a row of streams: the members of .gz, the frames of .zst, what pbzip2 and multistream dumps write.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.common.errors import UserError
from data_prep.common.files import BLOCK
from data_prep.readers.reader import UnreadableError

KEEPS = "--errors skip keeps what comes before and lists the file"
LARGEST_WINDOW = 1 << 31  # bytes: zstd --long=31, the most that there is
EXPANDS_FREELY = 1 << 30  # bytes that a file may hold however small it is
MOST_TIMES = 200  # its size, beyond those: more than any text that people wrote, and far less than a bomb


def zstd_stream() -> Any:
    """What expands a frame of .zst. The package is asked for where a file needs it: all else goes without."""
    try:
        import zstandard
    except ImportError as error:
        raise UserError("zstandard is not installed, which .zst needs: pip install zstandard") from error
    return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()


def faults() -> tuple[type[Exception], ...]:
    """What damage raises: OSError without a number that of bz2, ZstdError that of .zst where one was met."""
    zstandard = sys.modules.get("zstandard")
    return zlib.error, lzma.LZMAError, EOFError, ValueError, OSError, *([zstandard.ZstdError] if zstandard else [])


STREAMS: dict[str, tuple[Callable[[], Any], int]] = {
    ".gz": (lambda: zlib.decompressobj(31), 1 << 14),  # with the header and the checksum of gzip
    ".bz2": (bz2.BZ2Decompressor, 1 << 14),
    ".xz": (lzma.LZMADecompressor, 1 << 14),
    ".zst": (zstd_stream, 1 << 10),
}
"""By the suffix of a file: what expands one of its streams, and how many bytes go in at a time."""


def expanded(file: BinaryIO, path: Path, block_bytes: int = BLOCK) -> Iterator[tuple[bytes, int]]:
    """Yields what a compressed file holds from where it is open on, in blocks; each with where its stream begins.

    Raises UnreadableError at a damage, after all that comes before it, and at the bytes that make a file a bomb.
    """
    first, count, at = file.tell(), 0, file.tell()
    parts: list[bytes] = []
    size = 0
    try:
        for piece, stream in _pieces(file, path.suffix, block_bytes):
            if parts and (stream != at or size + len(piece) > block_bytes):
                yield b"".join(parts), at
                parts, size = [], 0
            at = stream
            parts += [piece] if piece else []
            size, count = size + len(piece), count + len(piece)
            if count > EXPANDS_FREELY and count > EXPANDS_FREELY + MOST_TIMES * (file.tell() - first):
                most = f"the most for a text is {EXPANDS_FREELY / 1e9:.2g} GB and {MOST_TIMES} times the size"
                what = f"{path}: expands to more than {count // 10**6:,} MB, as a bomb does; {most}"
                raise UnreadableError(what, f"if it is text, unpack it; {KEEPS}")
    except faults() as error:
        if parts:
            yield b"".join(parts), at
        raise error if isinstance(error, UserError) else _fault(path, at, count, error) from error
    if parts:
        yield b"".join(parts), at


def _pieces(file: BinaryIO, suffix: str, most: int) -> Iterator[tuple[bytes, int]]:
    """Yields what comes of each little that is put in, with where its stream begins; nothing with that of a new one."""
    make, step = STREAMS[suffix]
    stream = file.tell()
    data = file.read(step)
    limit = () if suffix == ".zst" else (most,)  # zstandard gives all that comes of its input, 32 MB of a kilobyte
    while data:
        expander, has_more = make(), False
        while not expander.eof:
            if not data and not has_more and not (data := file.read(step)):
                raise EOFError("it does not end")
            piece = expander.decompress(data, *limit)
            data, has_more = getattr(expander, "unconsumed_tail", b""), len(piece) >= most
            yield from ((piece[start : start + most], stream) for start in range(0, len(piece), most))
        data = expander.unused_data or file.read(step)
        if suffix in (".gz", ".xz"):
            while data and not data.strip(b"\0"):  # padding may follow a stream
                data = file.read(1 << 14)
            data = data.lstrip(b"\0")
        stream = file.tell() - len(data)
        yield b"", stream


def _fault(path: Path, stream: int, count: int, error: Exception) -> UnreadableError:
    """Says what is wrong with a compressed file, and where."""
    if isinstance(error, OSError) and error.errno is not None:
        return UnreadableError(f"{path}: cannot be read: {error.strerror}", KEEPS)
    place = "" if stream else f" (after {count:,} bytes of text)"
    what = f"{path}: truncated or damaged {path.suffix}: the stream at byte {stream:,}: {error}{place}"
    return UnreadableError(what, f"fetch or pack it anew; {KEEPS}")
