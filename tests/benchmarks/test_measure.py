"""Every number says on which machine it was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import measure
from benchmarks.measure import describe_environment


def test_the_gpu_is_named_where_torch_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = SimpleNamespace(name="H200", total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert describe_environment(["torch"]).items() >= {"gpu": "H200", "gpu_memory_gib": 141.0}.items()
    assert "gpu" not in describe_environment(["numpy"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in describe_environment(["torch"])


def test_a_machine_with_a_part_of_the_history_measures_the_commit_of_its_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the code is that of the wheels; otherwise it is some commit with changes."""
    root = tmp_path / "tree"
    (root / "benchmarks").mkdir(parents=True)
    code = root / "benchmarks" / "one.py"
    code.write_text("1")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(measure, "ROOT", root)
    monkeypatch.setattr(measure, "COMMIT", tmp_path / "commit.txt")
    code.write_text("2")
    old = measure.find_commit()
    (tmp_path / "commit.txt").write_text(f"abcdef {measure.compute_code_digest()}\n")
    assert old.endswith("+")
    assert measure.find_commit() == "abcdef"
    code.write_text("3")
    assert measure.find_commit() == old
