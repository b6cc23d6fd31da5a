"""The benchmark of gradients of weights measures what training takes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.mistakes import mistake_of

from benchmarks import weight_gradients
from benchmarks.measure import read_results
from benchmarks.weight_gradients import WeightGradients, by_turning, weights
from pretraining.model import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="no C++ compiler")


def test_each_weight_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "SIZES_HERE", ("mini",))
    said = io.StringIO()
    settings = WeightGradients(rows=(32,), threads=1, rounds=1, out=tmp_path / "found.json")
    weight_gradients.measure(settings, Console(file=said, width=150))
    rows = read_results(tmp_path / "found.json")["rows"]
    assert [(row["outputs"], row["inputs"]) for row in rows] == [*weights()]
    assert all(row["plain_ms"] > 0 and row["turned_ms"] > 0 for row in rows)
    assert "1,024" in said.getvalue()


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (32, 64)])
def test_both_ways_make_the_same(outputs: int, inputs: int) -> None:
    grad, x = torch.randn(40, outputs).bfloat16(), torch.randn(40, inputs).bfloat16()
    torch.testing.assert_close(by_turning(grad, x), grad.t() @ x, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--threads", "0"], ["--rows", "0"]], ids=" ".join)
def test_mistakes_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "from 1 on" in mistake_of(WeightGradients, weight_gradients.measure, words, capsys)
