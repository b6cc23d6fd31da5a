"""A file of weights that knows its own checksum, which stands in its header, where transformers reads past it.

It is that of the whole file with zeros in its place, and goes with the file wherever that is copied to. Files of others
have none, and are read as they are.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from operator import ne
from pathlib import Path
from typing import BinaryIO

from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.common.errors import DamageError
from data_prep.common.files import BLOCK

SIZE = 8
"""Bytes before the header, which say how long it is."""
BEFORE, DIGITS, AFTER = b'{"__metadata__":{"format":"pt","cloze_sha256":"', 64, b'"}'
"""How the header of a file with a checksum begins."""
CHANGED = 8
"""Bytes by which such a beginning may differ and still be taken for one that was damaged."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes tensors into a file with the mode that new files have here: safetensors gives it to its owner alone."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes a file of weights with its checksum; what it holds decides every byte."""
    save_tensors(weights, path, {"format": "pt", "cloze_sha256": "0" * DIGITS})
    with path.open("r+b") as file:
        file.seek(SIZE)
        assert file.read(len(BEFORE)).startswith(b'{"__metadata__":{"')
        file.seek(SIZE)
        file.write(BEFORE + b"0" * DIGITS + AFTER)  # safetensors puts the two in either order
        checksum = _checksum(file)
        file.seek(SIZE + len(BEFORE))
        file.write(checksum)
        file.flush()
        os.fsync(file.fileno())


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a file of safetensors; DamageError where it is not what its checksum says."""
    weights = load_file(path)
    with path.open("rb") as file:
        file.seek(SIZE)
        begin = file.read(len(BEFORE) + DIGITS)
        has_one = len(begin) == len(BEFORE) + DIGITS and sum(map(ne, begin, BEFORE)) <= CHANGED
        if has_one and begin[len(BEFORE) :] != _checksum(file):
            raise DamageError(
                f"{path}: its SHA-256 is not that of its header: the content changed after it was written; copy it "
                "again, make it anew, or save what another program made of it without the metadata of its header"
            )
    return weights


def _checksum(file: BinaryIO) -> bytes:
    """The checksum of a file with zeros where it stands."""
    file.seek(0)
    digest = hashlib.sha256(file.read(SIZE + len(BEFORE)) + b"0" * DIGITS)
    file.seek(DIGITS, os.SEEK_CUR)
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest().encode()
