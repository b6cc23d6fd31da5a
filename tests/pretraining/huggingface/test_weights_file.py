"""The checksum in a file of weights: any bit that changes is named, files of others are read, and the mode is usual."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.common.errors import DamageError, UserError
from pretraining.huggingface.folders import _read_file
from pretraining.huggingface.weights_file import read_weights, save_tensors, write_weights

WEIGHTS = {"b": torch.arange(6.0).view(2, 3), "a.weight": torch.ones(5, dtype=torch.bfloat16)}


def test_any_changed_bit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "vocab.txt").write_text("river\n")
    write_weights(WEIGHTS, path, ["vocab.txt", "task.json"])
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"model\.safetensors: "):
            _read_file(path)
    path.write_bytes(content)
    assert all(torch.equal(weight, WEIGHTS[name]) for name, weight in _read_file(path).items())


def test_equal_weights_have_equal_bytes_which_others_read(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("river\n")
    for number in range(8):
        write_weights(WEIGHTS, tmp_path / str(number), ["vocab.txt"])
    assert len({(tmp_path / str(number)).read_bytes() for number in range(8)}) == 1
    assert load_file(tmp_path / "0").keys() == WEIGHTS.keys()


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "pt", "sha256": "0" * 64}])
def test_files_of_others_are_read_as_they_are(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata=metadata)
    assert _read_file(tmp_path / "model.safetensors").keys() == WEIGHTS.keys()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_mode_is_what_the_umask_gives(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_weights(WEIGHTS, tmp_path / "a")
        save_tensors(WEIGHTS, tmp_path / "b")
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "ab"} == {0o666 & ~mask}


@pytest.mark.parametrize("name", ["", "a/b", "/etc/passwd"])
def test_a_header_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "w", {"format": "pt", "cloze_files": f"{name}=0"})
    with pytest.raises(DamageError, match="no name of a file beside it"):
        read_weights(tmp_path / "w")
