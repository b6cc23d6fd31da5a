"""The benchmark of optimizers times their steps alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT
from support.mistakes import mistake_of
from support.processes import run_program
from support.shards import make_shards

from benchmarks import optimizers
from benchmarks.measure import read_results
from benchmarks.optimizers import Optimizers


@pytest.mark.slow
def test_optimizers_take_turns(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards")
    words = ["--size", "tiny", "--optimizers", "lamb", "--rounds", "2", "--dtype", "fp32", "--length", "32"]
    words += ["--shards", str(shards), "--out", str(tmp_path / "found.json")]
    done = run_program("benchmarks/optimizers.py", words, ROOT, 120)
    assert done.code == 0, done.output + done.errors
    adam, lamb = read_results(tmp_path / "found.json")["rows"]
    assert (adam["optimizer"], lamb["optimizer"]) == ("adamw", "lamb")
    assert adam["times_adamw"]["median"] == 1
    assert lamb["times_adamw"]["lowest"] > 0


@pytest.mark.parametrize("words", [["--optimizers", "sgd"], ["--size", "huge"], ["--rounds", "0"]], ids=" ".join)
def test_mistakes_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--optimizers: of adamw, lamb, muon" in mistake_of(Optimizers, optimizers.measure, words, capsys)
