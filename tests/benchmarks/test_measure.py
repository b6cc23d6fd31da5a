"""Every number says on which machine it was measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks.measure import ResultsFile, describe_environment, write_results
from benchmarks.report import read_all
from data_prep.common.errors import UserError


def test_the_gpu_is_named_where_torch_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = SimpleNamespace(name="H200", total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert describe_environment(["torch"]).items() >= {"gpu": "H200", "gpu_memory_gib": 141.0}.items()
    assert "gpu" not in describe_environment(["numpy"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in describe_environment(["torch"])


def test_a_run_that_lacks_a_side_keeps_its_own_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def results(*sides: str, benchmark: str = "inference") -> dict[str, Any]:
        contest = {"sides": {side: {"p50_ms": 1.0} for side in sides}}
        return {"format": 2, "benchmark": benchmark, "environment": {}, "models": {"mini": {"1 x 128": contest}}}

    path = tmp_path / "inference-here.json"
    assert write_results(path, results("ours", "onnxruntime")) == path
    own = write_results(path, results("ours"))
    assert own != path
    assert "onnxruntime (models, mini, 1 x 128)" in capsys.readouterr().err
    assert json.loads(path.read_text()) == results("ours", "onnxruntime")
    assert json.loads(own.read_text()) == results("ours")
    assert write_results(path, results("ours", "onnxruntime", "another")) == path
    assert read_all(tmp_path).keys() == {path.stem}, "what is partial is on no page"
    for models in ({"mini": dict[str, Any]()}, dict[str, Any]()):
        assert write_results(path, {**results("ours"), "models": models}) == own
        assert "ours (models, mini, 1 x 128)" in capsys.readouterr().err
    write_results(tmp_path / "more", {**results("ours"), "growth": []})
    write_results(tmp_path / "more", results("ours"))
    assert "it has growth, which is not measured here" in capsys.readouterr().err
    path.write_text("notes of mine")
    assert write_results(path, results("ours")) != path
    assert path.read_text() == "notes of mine"


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1, "benchmark": "throughput"}'])
def test_what_is_none_of_ours_is_measured_anew_and_never_mixed_in(content: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(content)
    assert ResultsFile("throughput", [], path).readable == {}
    with pytest.raises(UserError, match=r"found\.json"):
        _ = ResultsFile("throughput", [], path).earlier


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
