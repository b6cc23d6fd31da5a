"""The plan that --check prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import ROOT
from support.training import Place

from pretraining import train as entry

RECIPES = sorted((ROOT / "pretraining" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.usefixtures("kept_signals")
def test_the_plan_of_every_recipe(path: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", str(ranks), "--pieces-per-second", "1e6"]
    code = entry.main(["--recipe", str(path), "--check", *options])
    printed = capsys.readouterr()
    if code == 2:  # small batches do not divide among so many
        assert "does not divide by" in printed.err
        assert ranks > 1
        return
    assert (code, printed.err) == (0, "")
    assert f" on {ranks} rank" in printed.out
    assert "learning rate" in printed.out


@pytest.mark.usefixtures("kept_signals")
def test_the_plan_with_data(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--recipe", str(place.recipe), "--data", str(place.data), "--check"]
    assert entry.main(command) == 0
    first = capsys.readouterr().out
    assert "vocabulary 229; fp32 on 1 rank, ZeRO 1, adamw" in first
    assert "no --data" not in first
    assert entry.main([*command, "--precision.dtype", "fp16", "--ranks", "3"]) == 0  # for another machine
    assert "fp16 on 3 ranks" in capsys.readouterr().out
    assert entry.main([*command, "--ranks", "5"]) == 2
    assert "does not divide by 5 ranks" in capsys.readouterr().err
