"""Weight files with checksums in their header, of themselves and of the files beside them; transformers ignores these.

The checksum of a file is computed with zeros in its own place. Files without checksums are read unchecked.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import warnings
from collections.abc import Iterable, Mapping
from operator import ne
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.common.errors import DamageError
from data_prep.common.files import BLOCK, replacing, sha256

STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in the header."""
SIZE = 8
"""Bytes before the header, with its length."""
BEFORE, DIGITS = b'{"__metadata__":{"format":"pt","cloze_sha256":"', 64
"""Begin of the header of a file with a checksum."""
BESIDE = "cloze_files"
"""Key in the header for the checksums of files beside it, as NAME=CHECKSUM."""
EDITED = ("config.json", "tokenizer_config.json")
"""Files that people edit, for example to name labels; their other content is compared with the weights."""
CHANGED = 8
"""Number of bytes by which that begin may differ and still count as a damaged one."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors into a file with the mode of new files; safetensors makes it readable by its owner only."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path)
    path.chmod(mode)


def write_weights(
    weights: Mapping[str, Tensor], path: Path, beside: Iterable[str] = (), dtype: torch.dtype = torch.float32
) -> None:
    """Writes a weight file with its checksum and those of files beside it. Equal contents have equal bytes.

    Weights are converted to `dtype` and written one after another, so that one at a time is copied. They may be views
    of the same memory, which safetensors refuses to write.
    """
    there = [f"{name}={sha256(path.with_name(name))}" for name in beside if path.with_name(name).is_file()]
    files = {BESIDE: " ".join(there)} if there else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "cloze_sha256": "0" * DIGITS, **files}}
    end = 0
    for name, weight in (ordered := sorted(weights.items())):
        begin, end = end, end + weight.numel() * dtype.itemsize
        header[name] = {"dtype": STORED_AS[dtype], "shape": [*weight.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % SIZE)
    with replacing(path) as file:  # the weights may be a view of the file that is at this path
        file.write(len(text).to_bytes(SIZE, "little") + text)
        for _, weight in ordered:
            file.write(weight.detach().to(dtype).reshape(-1).view(torch.uint8).numpy().data)
        checksum = _checksum(file)
        file.seek(SIZE + len(BEFORE))
        file.write(checksum)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file; raises DamageError if it, or a file beside it, does not have its checksum."""
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
    """Computes the checksum of a file with zeros in its place."""
    file.seek(0)
    digest = hashlib.sha256(file.read(SIZE + len(BEFORE)) + b"0" * DIGITS)
    file.seek(DIGITS, os.SEEK_CUR)
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest().encode()
