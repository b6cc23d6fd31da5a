"""A file of weights with its own checksum and those of files beside it in its header, where transformers reads past.

Its own is that of the whole file with zeros in its place, and goes with the file wherever that is copied to. Files of
others have none, and are read as they are.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Iterable, Mapping
from operator import ne
from pathlib import Path
from typing import BinaryIO

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.common.errors import DamageError
from data_prep.common.files import BLOCK, sha256

SIZE = 8
"""Bytes before the header, which say how long it is."""
BEFORE, DIGITS = b'{"__metadata__":{"format":"pt","cloze_sha256":"', 64
"""How the header of a file with a checksum begins."""
BESIDE = "cloze_files"
"""The key in the header of the files beside it, as NAME=CHECKSUM."""
EDITED = ("config.json", "tokenizer_config.json")
"""Files that people change by hand, as to name labels: what else they say is compared with the weights."""
CHANGED = 8
"""Bytes by which such a beginning may differ and still be taken for one that was damaged."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes tensors into a file with the mode that new files have here: safetensors gives it to its owner alone."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def write_weights(weights: Mapping[str, Tensor], path: Path, beside: Iterable[str] = ()) -> None:
    """Writes a file of weights with its checksum, and with those of the files of these names that lie beside it; what
    it holds decides every byte."""
    there = [f"{name}={sha256(path.with_name(name))}" for name in beside if path.with_name(name).is_file()]
    files = {BESIDE: " ".join(there)} if there else {}
    save_tensors(weights, path, {"format": "pt", "cloze_sha256": "0" * DIGITS, **files})
    after = "".join(f',"{name}":"{value}"' for name, value in files.items())
    with path.open("r+b") as file:
        file.seek(SIZE)
        assert file.read(len(BEFORE)).startswith(b'{"__metadata__":{"')
        file.seek(SIZE)
        file.write(BEFORE + b"0" * DIGITS + f'"{after}}}'.encode())  # safetensors puts them in any order
        checksum = _checksum(file)
        file.seek(SIZE + len(BEFORE))
        file.write(checksum)
        file.flush()
        os.fsync(file.fileno())


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a file of safetensors; DamageError where it, or a file beside it, is not what its checksum says."""
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
    with safe_open(path, "pt") as header:
        for name, _, checksum in (file.partition("=") for file in (header.metadata() or {}).get(BESIDE, "").split()):
            if not name or name != Path(name).name:
                raise DamageError(f"{path}: its header tells of {name!r}, which is no name of a file beside it")
            beside = path.with_name(name)
            if beside.is_file() and sha256(beside) != checksum:
                fault = f"{beside}: its SHA-256 is not the one in the header of {path.name}: it changed after both were"
                fault += " written; copy it again, or save the weights anew with transformers"
                if name not in EDITED:
                    raise DamageError(fault)
                warnings.warn(fault, stacklevel=2)
    return weights


def _checksum(file: BinaryIO) -> bytes:
    """The checksum of a file with zeros where it stands."""
    file.seek(0)
    digest = hashlib.sha256(file.read(SIZE + len(BEFORE)) + b"0" * DIGITS)
    file.seek(DIGITS, os.SEEK_CUR)
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest().encode()
