"""What is written of a checkpoint is read back, and which checkpoints are kept."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.pretraining_reference import SMALL
from torch import Tensor

from data_prep.common.errors import DamageError
from data_prep.common.launchers import World
from pretraining.checkpoint import writing
from pretraining.checkpoint.record import DAMAGED, FOLDER, RECORD
from pretraining.checkpoint.writing import Snapshots, remove_old
from pretraining.config.settings import Checkpoints, Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.huggingface.weights_file import save_tensors
from pretraining.objectives.declaration import build_model
from pretraining.processes.group import connect, disconnect

RENAME = os.rename


def test_a_damaged_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / FOLDER / f"step-{step:08}").mkdir(parents=True)
        (tmp_path / FOLDER / f"step-{step:08}" / RECORD).touch()
    (tmp_path / FOLDER / "step-00000002" / DAMAGED).touch()
    (tmp_path / FOLDER / "step-00000003" / RECORD).unlink()
    remove_old(tmp_path, Checkpoints(keep=1))
    assert sorted(path.name[-1] for path in (tmp_path / FOLDER).iterdir()) == ["2", "3", "5"]


def rename_no_folder(source: Path, target: Path) -> None:
    """As overlayfs answers where a folder lies in a lower layer."""
    if os.path.isdir(source):
        raise OSError(errno.EXDEV, "Invalid cross-device link")
    RENAME(source, target)


def test_checkpoints_are_removed_where_no_folder_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record first: what is left by a kill must not be taken for a checkpoint."""
    removed = []
    rmtree = shutil.rmtree

    def remove(folder: Path) -> None:
        removed.append((folder.name, (folder / RECORD).exists()))
        rmtree(folder)

    monkeypatch.setattr(os, "rename", rename_no_folder)
    monkeypatch.setattr(shutil, "rmtree", remove)
    for step in range(1, 4):
        folder = tmp_path / FOLDER / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / RECORD).touch()
    remove_old(tmp_path, Checkpoints(keep=1))
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step-00000003"]
    assert removed == [("step-00000001", False), ("step-00000002", False)]


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


def test_a_snapshot_takes_one_copy_for_each_flat_tensor_and_has_every_weight() -> None:
    """However many parameters there are: a GPU gives many small copies slowly."""
    connect(World(), torch.device("cpu"))
    model = build_model(SMALL).initialize(1)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    settings = EngineSettings(precision=Precision(dtype="fp32"), parallel=Parallel(zero=1))
    engine = Engine(model, settings, torch.device("cpu"))
    snapshots = Snapshots()
    with torch.profiler.profile() as profile:
        found = snapshots.take(engine)
    engine.close()
    disconnect()
    copies = sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
    assert copies == len(found) * len(engine.flat_tensors)
    assert {*found} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(found["weight"][f"{name}:0"], weight.flatten()) for name, weight in weights.items())
    assert {*map(len, found.values())} == {len(weights)}
