"""Table 5 on one GPU: what is packed is all that is needed, and what is done in time comes into the table."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import processes
from benchmarks.gpu import tables
from benchmarks.gpu.tables import GpuTables
from data_prep.common.errors import UserError

QUIET = Console(quiet=True)


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


def test_documents_and_tasks_are_packed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(data, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "data.tar.xz") as tar:
        names = tar.getnames()
    assert {*tables.CARRIED, "documents/vocab.txt"} <= {*names}
    assert any(name.endswith(".arrow") for name in names)
    monkeypatch.setattr(tables, "MOST", 0)
    with pytest.raises(UserError, match="more than 0 MiB; give less text"):
        pack(data, tmp_path / "out")


def test_shares_run_at_once_and_those_that_are_late_are_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the first share waits for ever, and the others say which data they were given."""
    pack(data, tmp_path / "out")
    begun: list[tuple[str, str]] = []
    waits = "import sys, time; time.sleep(300 if sys.argv[-1] == '1/3' else 0)"

    def start_other(command: Sequence[str], environment: dict[str, str]) -> Any:
        begun.append((command[-1], environment["CLOZE_DATA"]))
        return processes.start([sys.executable, "-c", waits, *command[-2:]], environment)

    monkeypatch.setattr(tables, "start", start_other)
    monkeypatch.setattr(tables, "ENDING", 0.0)
    monkeypatch.setitem(os.environ, "CLOZE_DATA", "before")
    at = time.monotonic()
    settings = GpuTables("run", tmp_path / "out", minutes=0.1, shares=3, copies=tmp_path / "copies")
    assert tables.run(settings, QUIET) == 75
    assert time.monotonic() - at < 60
    assert [share for share, _ in begun] == ["1/3", "2/3", "3/3"]
    assert {place for _, place in begun} == {str(tmp_path / "out" / "data")}
    assert json.loads((tmp_path / "copies" / "table5-gpu.json").read_text())["rows"]
