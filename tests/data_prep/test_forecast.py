"""What shard.py --check says of a run, beside what the run takes; and that all of it grows with the text alone."""

from __future__ import annotations

import gzip
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from conftest import write_wiki
from support.sharding import run

from data_prep import forecast, shard
from data_prep.forecast import Amount, Costs, plan_steps
from data_prep.settings import Settings
from data_prep.shards import KEPT

Usage = namedtuple("Usage", "total used free")


def numbers_after(output: str, start: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith(start))
    return [float(word.replace(",", "")) for word in line.split() if word.replace(",", "").replace(".", "").isdigit()]


@pytest.mark.parametrize("compressed", [False, True])
def test_the_shards_are_as_large_as_the_check_says(
    compressed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wiki = write_wiki(tmp_path / "wiki", documents=3000, files=6)
    if compressed:
        for path in list(wiki.iterdir()):
            with gzip.open(f"{path}.gz", "wb") as file:
                file.write(path.read_bytes())
            path.unlink()
    assert run(wiki, tmp_path / "out", "--check") == 0
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["wiki"]
    disk = numbers_after(capfd.readouterr().out, "disk: ")
    assert run(wiki, tmp_path / "out") == 0
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("shard-*"))
    assert disk[1] == pytest.approx(size / 1e6, rel=0.15)
    assert disk[2] == pytest.approx(len(list((tmp_path / "out").rglob("shard-*"))), abs=2)


def test_everything_grows_with_the_text_alone() -> None:
    """From 20 GB to ten terabytes a byte of text takes no more than at 2 GB, but for one more round of merging."""
    settings = Settings()
    kinds = {"examples-{}": 1e-7, "merged-{}-1": 1e-8, "shards-{}": 3e-8}  # of what was measured, in proportion
    seconds = {step.format(length): cost for step, cost in kinds.items() for length in settings.lengths}
    costs = Costs(
        {"documents": 1e-7, "tokens": 1e-7, **seconds}, examples={128: 3.0, 512: 3.0}, shards={128: 3.0, 512: 3.0}
    )
    each = {}
    for size in (2e9, 2e10, 1e12, 1e13):
        steps = plan_steps(settings, costs, Amount(size), round(size / (16 << 20)))
        each[size] = sum(step.core_seconds for step in steps) / size
        assert max(step.disk for step in steps) < 7.2 * size  # documents in pieces, all shards, a set of examples
        assert sum(step.tasks for step in steps) < 20 * size / (16 << 20) + 500
    assert each[1e13] < 1.6 * each[2e9]
    assert each[1e13] < 1.3 * each[1e12]


def test_a_disk_that_is_too_small_is_told_before_anything_is_read(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    assert run(wiki, tmp_path / "out") == 0
    out = capfd.readouterr().out
    assert f"in {tmp_path / 'out'} at its largest, and 0.0 MB are free" in out
    assert out.index("at its largest") < out.index("documents ")
    assert run(wiki, tmp_path / "other", "--check") == 0
    assert "are free" in capfd.readouterr().out


def test_a_check_of_documents_in_pieces_has_no_steps_of_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And with weights it says as much more as there will be."""
    wiki = write_wiki(tmp_path / "wiki", documents=2000)
    kept, asked = tmp_path / "kept", ["--from", str(tmp_path / "kept"), "--lengths", "32", "--duplicates", "2"]
    assert run(wiki, kept, "--documents-only") == 0
    for more in ([], ["--weight", "wiki=3"]):
        out = tmp_path / f"out{len(more)}"
        capfd.readouterr()
        assert shard.main([*asked, *more, "--out", str(out), "--check"]) == 0
        said = capfd.readouterr().out
        assert not re.search("^(documents|tokens) ", said, re.MULTILINE)
        _, stay = numbers_after(said, "disk: ")[:2]
        assert shard.main([*asked, *more, "--out", str(out), "--workers", "1"]) == 0
        size = sum(path.stat().st_size for path in out.rglob("shard-*"))
        assert stay == pytest.approx(size / 1e6, rel=0.15)
        assert not (out / KEPT).exists()


def test_a_check_of_nothing_is_refused_as_a_run_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert shard.main(["--docs", str(tmp_path / "none"), "--check"]) == 2
    assert "no such file or folder" in capfd.readouterr().err


def test_sizes_are_spelled_in_units_that_fit() -> None:
    assert [forecast.format_size(size) for size in (5e5, 3.21e8, 4e9, 7.77e12)] == [
        "0.5 MB",
        "321.0 MB",
        "4.0 GB",
        "7.8 TB",
    ]
