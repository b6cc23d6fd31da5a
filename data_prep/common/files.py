"""Files that appear whole or not at all, with their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.common.errors import DamageError, UserError

BLOCK = 1 << 20
UNFINISHED = ".tmp"
NUMBERS = re.compile(r"\[\n[\s\d.,e-]+\]")  # lists of numbers go on one line


@dataclass(frozen=True)
class FileRecord:
    """What a finished file was when it was written."""

    path: str
    """relative to the output folder"""
    size: int
    """bytes"""
    rows: int
    sha256: str

    @classmethod
    def of(cls, folder: Path, path: str, rows: int = 0) -> FileRecord:
        """Of a file that is there."""
        return cls(path, (folder / path).stat().st_size, rows, sha256(folder / path))

    def check(self, folder: Path) -> None:
        """Raises DamageError unless the file is there with the same bytes."""
        path = folder / self.path
        if not path.is_file():
            raise DamageError(f"{path}: missing; its record says {self.size:,} bytes")
        if (size := path.stat().st_size) != self.size:
            raise DamageError(f"{path}: {size:,} bytes, its record says {self.size:,}")
        if sha256(path) != self.sha256:
            raise DamageError(
                f"{path}: its SHA-256 is not that of its record: the content changed after it was written"
            )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sha256(path: Path) -> str:
    """The checksum of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes its name `path` only when it is complete and on the disk."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):  # it may never have been there
            unfinished.unlink()
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_json(path: Path, content: Any) -> None:
    """Writes `content` atomically, in the one form that we hash and compare."""
    with replacing(path) as file:
        file.write(json_bytes(content))


def json_bytes(content: Any) -> bytes:
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
    return (NUMBERS.sub(lambda match: " ".join(match[0].split()), text) + "\n").encode()


def read_json(path: Path) -> Any:
    """Reads what write_json wrote."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise DamageError(f"{path}: cannot be read: {error}") from error
