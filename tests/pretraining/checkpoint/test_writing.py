"""What is written of a checkpoint is read back, and which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_prep.common.errors import DamageError
from pretraining.checkpoint import writing
from pretraining.checkpoint.record import DAMAGED, FOLDER, RECORD
from pretraining.checkpoint.writing import retire
from pretraining.config.settings import Checkpoints
from pretraining.huggingface.weights_file import save_tensors


def test_a_damaged_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / FOLDER / f"step-{step:08}").mkdir(parents=True)
        (tmp_path / FOLDER / f"step-{step:08}" / RECORD).touch()
    (tmp_path / FOLDER / "step-00000002" / DAMAGED).touch()
    (tmp_path / FOLDER / "step-00000003" / RECORD).unlink()
    retire(tmp_path, Checkpoints(keep=1))
    assert sorted(path.name[-1] for path in (tmp_path / FOLDER).iterdir()) == ["2", "3", "5"]


def test_a_file_that_reads_otherwise_than_it_was_written_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_with_a_wrong_bit(tensors: dict[str, Tensor], path: Path) -> None:
        save_tensors(tensors, path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    tensors = {"weight:0": torch.arange(5.0)}
    writing._write_file(tmp_path, "right.safetensors", tensors)
    monkeypatch.setattr(writing, "save_tensors", save_with_a_wrong_bit)
    with pytest.raises(DamageError, match=r"wrong\.safetensors"):
        writing._write_file(tmp_path, "wrong.safetensors", tensors)
