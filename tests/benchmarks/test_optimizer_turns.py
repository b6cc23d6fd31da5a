"""The benchmark of optimizers measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from support.training import Place

from benchmarks import optimizers
from benchmarks.measure import read_results
from benchmarks.optimizers import Optimizers


@pytest.mark.slow
def test_optimizers_take_turns(shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "LENGTH", 32)
    settings = Optimizers(shared.data, "tiny", ("lamb",), rounds=2, out=tmp_path / "found.json")
    optimizers.measure(settings, Console(quiet=True))
    adam, lamb = read_results(tmp_path / "found.json")["rows"]
    assert (adam["optimizer"], lamb["optimizer"]) == ("adamw", "lamb")
    assert adam["times_adamw"]["median"] == 1
    assert lamb["times_adamw"]["lowest"] > 0
