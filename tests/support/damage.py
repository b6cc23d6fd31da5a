"""Damage to files, and the files of a checkpoint."""

from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from data_prep.common.files import FileRecord
from pretraining.checkpoint.record import RECORD, WEIGHT, read_record, write_record
from pretraining.optimizers.declaration import DEFAULT, optimizers

FILES = [*(f"{kind}-00001-of-00002.safetensors" for kind in (WEIGHT, *optimizers()[DEFAULT].state)), RECORD]
"""those of rank 1 of two, and the record"""


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_number(path: Path) -> None:
    """Still good JSON, and still a number of steps."""
    content = path.read_text()
    assert '"phase_step": 1,' in content
    path.write_text(content.replace('"phase_step": 1,', '"phase_step": 0,'))


def spoil_weight(checkpoint: Path, value: float) -> str:
    """Gives a weight a value that is no number, with checksums as if it had always been there; returns its name."""
    path = min(checkpoint.glob(f"{WEIGHT}-*"))
    weights = load_file(path)
    key = min(weights)
    weights[key].view(-1)[-1] = value
    save_file(weights, path)
    record = read_record(checkpoint)
    files = [FileRecord.from_file(checkpoint, file.path, file.rows) for file in record.files]
    write_record(checkpoint, replace(record, files=tuple(files)))
    return key.partition(":")[0]
