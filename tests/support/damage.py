"""Damage to files, and the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from pretraining.checkpoint.record import RECORD, WEIGHT
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
