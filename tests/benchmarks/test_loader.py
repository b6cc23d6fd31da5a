"""The benchmark of the loader measures what it says, and tells mistakes in one line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.mistakes import mistake_of
from support.shards import make_shards

from benchmarks import loader
from benchmarks.loader import Loader
from benchmarks.measure import read_results
from data_prep.shards import Manifest


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of lengths 32 and 64."""
    return make_shards(tmp_path_factory.mktemp("shards"))


def test_ranks_and_ways_to_mask_are_measured(shards: Path, tmp_path: Path) -> None:
    settings = Loader(shards, length=32, sequences=4, ranks=(1, 3), steps=2, out=tmp_path / "found.json")
    said = io.StringIO()
    loader.measure(settings, Console(file=said, width=100))
    found = read_results(tmp_path / "found.json")
    speeds = found["speeds"]
    ways = [(ranks, masks) for ranks in (1, 3) for masks in ("static", "dynamic")]
    assert [(row["ranks"], row["masks"]) for row in speeds] == ways
    for each in (row["pieces_per_second"] for row in speeds):
        assert 0 < each["lowest"] <= each["median"] <= each["highest"]
    assert "dynamic" in said.getvalue()


def test_of_what_is_read_a_rank_counts_its_own_pieces(shards: Path) -> None:
    manifest = Manifest.read(shards)
    dataset = loader.open_dataset(shards, manifest, 32, 2, "static")
    pieces, seconds = loader.make_reader(dataset, 4, 2)()
    assert 4 * 3 <= pieces <= 4 * 32, "four sequences, and not the eight of both ranks"
    assert seconds > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "0"], "at least 1"),
        (["--length", "4096"], "--length 4096: "),
        (["--data", "benchmarks"], "benchmarks: no manifest.json"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: list[str], told: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(shards), "--out", str(tmp_path / "out.json"), *words]
    [line] = mistake_of(Loader, loader.measure, given, capsys).splitlines()
    assert line.startswith("error: ")
    assert told in line
