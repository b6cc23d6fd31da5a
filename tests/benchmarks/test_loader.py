"""The benchmarks of the loader and of optimizers measure what they say."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.training import Place

from benchmarks import loader, optimizers
from benchmarks.loader import Loader
from benchmarks.measure import read_results
from benchmarks.optimizers import Optimizers
from data_prep.shards import Manifest


def test_ranks_and_ways_to_mask_are_measured(shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "RANKS", (1, 3))
    monkeypatch.setattr(loader, "SEQUENCES", 4)
    settings = Loader(shared.data, length=32, rounds=2, out=tmp_path / "found.json")
    said = io.StringIO()
    loader.measure(settings, Console(file=said, width=100))
    found = read_results(tmp_path / "found.json")
    speeds = found["speeds"]
    ways = [(ranks, masks) for ranks in (1, 3) for masks in ("static", "dynamic")]
    assert [(row["ranks"], row["masks"]) for row in speeds] == ways
    for each in (row["pieces_per_second"] for row in speeds):
        assert 0 < each["lowest"] <= each["median"] <= each["highest"]
    assert "dynamic" in said.getvalue()


def test_of_what_is_read_a_rank_counts_its_own_pieces(shared: Place) -> None:
    manifest = Manifest.read(shared.data)
    dataset = loader.open_dataset(shared.data, manifest, 32, 2, "static")
    pieces, seconds = loader.make_reader(dataset, 4, 2)()
    assert 4 * 3 <= pieces <= 4 * 32, "four sequences, and not the eight of both ranks"
    assert seconds > 0


@pytest.mark.slow
def test_optimizers_take_turns(shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "LENGTH", 32)
    settings = Optimizers(shared.data, "tiny", ("lamb",), rounds=2, out=tmp_path / "found.json")
    optimizers.measure(settings, Console(quiet=True))
    adam, lamb = read_results(tmp_path / "found.json")["rows"]
    assert (adam["optimizer"], lamb["optimizer"]) == ("adamw", "lamb")
    assert adam["times_adamw"]["median"] == 1
    assert lamb["times_adamw"]["lowest"] > 0
