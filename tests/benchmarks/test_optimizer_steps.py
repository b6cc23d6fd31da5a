"""The benchmark of optimizers times their steps alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.mistakes import mistake_of
from support.shards import make_shards

from benchmarks import optimizers
from benchmarks.measure import read_results
from benchmarks.optimizers import Optimizers


@pytest.mark.slow
def test_optimizers_take_turns(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards")
    words = ["--size", "tiny", "--optimizers", "lamb", "--rounds", "2", "--dtype", "fp32", "--length", "32"]
    words += ["--shards", str(shards), "--out", str(tmp_path / "found.json")]
    command = [sys.executable, str(ROOT / "benchmarks" / "optimizers.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    adam, lamb = read_results(tmp_path / "found.json")["rows"]
    assert (adam["optimizer"], lamb["optimizer"]) == ("adamw", "lamb")
    assert adam["times_adamw"]["median"] == 1
    assert lamb["times_adamw"]["lowest"] > 0


@pytest.mark.parametrize("words", [["--optimizers", "sgd"], ["--size", "huge"], ["--rounds", "0"]], ids=" ".join)
def test_mistakes_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--optimizers: of adamw, lamb, muon" in mistake_of(Optimizers, optimizers.measure, words, capsys)
