"""Table 5 on one GPU: what is packed is all that is needed, and what is done in time comes into the table."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import processes
from benchmarks.gpu import tables
from benchmarks.gpu.tables import GpuTables
from data_prep.common.errors import UserError

QUIET = Console(quiet=True)
SHARE = """
import signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep(1)
    Path(sys.argv[2]).touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
if sys.argv[1] == "2/3":
    print("no luck")
    sys.exit(2)
time.sleep(300 if sys.argv[1] == "1/3" else 0)
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text and tasks."""
    folder = tmp_path / "data"
    for name in tables.CARRIED:
        (folder / name).mkdir(parents=True)
        (folder / name / "dev.tsv").write_text(name)
    pages = (f'<doc id="{n}" url="u" title="T{n}">\nT{n}\n\n{"A river runs here. " * 30}\n</doc>\n' for n in range(9))
    (folder / "wiki").write_text("".join(pages))
    monkeypatch.setattr(tables, "DATA", folder)
    return folder


def pack(data: Path, out: Path) -> None:
    tables.pack(GpuTables("pack", out, text=(data / "wiki",)), QUIET)


@pytest.mark.slow
def test_documents_and_tasks_are_packed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(data, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "data.tar.xz") as tar:
        names = tar.getnames()
    assert {*tables.CARRIED, "documents/vocab.txt"} <= {*names}
    assert any(name.endswith(".arrow") for name in names)
    monkeypatch.setattr(tables, "MOST", 0)
    with pytest.raises(UserError, match="more than 0 MiB; give less text"):
        pack(data, tmp_path / "out")


@pytest.mark.slow
def test_shares_run_at_once_and_those_that_are_late_are_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the first share saves when it is asked to end, the second fails, and the third is done."""
    pack(data, tmp_path / "out")
    begun: list[tuple[str, str]] = []
    saved = tmp_path / "saved"

    def start_other(command: Sequence[str], environment: Mapping[str, str]) -> Any:
        begun.append((command[-1], environment["CLOZE_DATA"]))
        return processes.start([sys.executable, "-c", SHARE, command[-1], str(saved)], environment)

    monkeypatch.setattr(tables, "start", start_other)
    monkeypatch.setattr(tables, "ENDING", 30.0)
    monkeypatch.setitem(os.environ, "CLOZE_DATA", "before")
    at = time.monotonic()
    settings = GpuTables("run", tmp_path / "out", minutes=0.6, shares=3, copies=tmp_path / "copies")
    assert tables.run(settings, Console(force_terminal=False, width=500)) == 1
    said = capsys.readouterr().out
    assert "share 2/3 failed with 2: no luck" in said
    assert "1 of 3 shares were not done in time" in said
    assert saved.exists()
    assert time.monotonic() - at < 60
    assert [share for share, _ in begun] == ["1/3", "2/3", "3/3"]
    assert {place for _, place in begun} == {str(tmp_path / "out" / "data")}
    assert json.loads((tmp_path / "copies" / "table5-gpu.json").read_text())["rows"]


def test_without_data_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOZE_DATA", raising=False)
    with pytest.raises(UserError, match="make gpu-text packs it"):
        tables.run(GpuTables("run", tmp_path), QUIET)
