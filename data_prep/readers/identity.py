"""Reads the two ends of a file: the first bytes of its content, and a key that changes with it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data_prep.readers.compression import expanded
from data_prep.readers.cutting import BYTE_ORDER_MARK
from data_prep.readers.reader import COMPRESSED, UnreadableError, readable

EDGE = 1 << 16  # bytes at each end of a file that its key is made of
HEAD = 1 << 14  # bytes of the content by which a format is known


class Look(NamedTuple):
    """The first bytes of a file, its key, and whether it is damaged."""

    head: bytes
    """The first bytes of the content, without a byte-order mark."""
    content: str
    """The key of the content, which stays when the file is copied or touched."""
    is_damaged: bool = False
    """Whether the head ends where the file is damaged."""


def look(path: str | Path, size: int, most: int = HEAD) -> Look:
    """Looks at a file of a size that is known; raises UnreadableError where it cannot be opened or read.

    The head has `most` bytes, which are not more than `EDGE`.
    """
    is_compressed = str(path).endswith(COMPRESSED)
    with readable(path), open(path, "rb", buffering=HEAD if is_compressed else 0) as file:
        head, is_damaged = file.read(EDGE), False
        key = _compute_key(file, head, size)
        if is_compressed:
            file.seek(0)
            head, is_damaged = _expanded_head(file, Path(path), most)
        return Look(head.removeprefix(BYTE_ORDER_MARK)[:most], key, is_damaged)


def _compute_key(file: BinaryIO, start: bytes, size: int) -> str:
    """Hashes the size, the start and the end of a file, of which the start is read already."""
    digest = hashlib.sha256(b"%d " % size + start)
    if size > len(start):
        file.seek(max(len(start), size - EDGE))
        digest.update(file.read(EDGE))
    return digest.hexdigest()[:16]


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
