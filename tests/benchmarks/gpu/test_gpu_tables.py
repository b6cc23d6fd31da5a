"""Table 5 on one GPU: what is packed is all that is needed, and what is done in time comes into the table."""

import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from support.commands import assert_refusal

from benchmarks.gpu import tables
from benchmarks.gpu.tables import GpuTables
from benchmarks.processes import Child

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


@pytest.mark.slow
def test_what_is_packed_is_enough_for_shares_of_which_late_ones_are_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the first share saves when it is asked to end, the second fails, and the third is done."""
    packing = GpuTables("pack", tmp_path / "out", text=(data / "wiki",))
    tables.pack(packing, QUIET)
    with tarfile.open(tmp_path / "out" / "data.tar.xz") as tar:
        names = tar.getnames()
    assert {*tables.CARRIED, "documents/vocab.txt"} <= {*names}
    assert any(name.endswith(".arrow") for name in names)
    begun: list[tuple[str, str]] = []
    saved = tmp_path / "saved"

    def start_other(command: Sequence[str], say: Callable[[str], None]) -> Child:
        begun.append((command[-1], os.environ["CLOZE_DATA"]))
        return Child([sys.executable, "-c", SHARE, command[-1], str(saved)], say)

    monkeypatch.setattr(tables, "Child", start_other)
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
    assert begun == [(share, str(tmp_path / "out" / "data")) for share in ("1/3", "2/3", "3/3")]
    assert json.loads((tmp_path / "copies" / "table5-gpu.json").read_text())["rows"]
    monkeypatch.setattr(tables, "MOST", 0)
    assert_refusal("more than 0 MiB; give less text", tables.pack, packing, QUIET)


def test_any_python_unpacks_the_data_and_nothing_outside_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.10.12 and 3.11.4 extractall has no filters."""
    (tmp_path / "dev.tsv").write_text("text")

    def unpack(*names: str) -> dict[str, str]:
        with tarfile.open(tmp_path / tables.ARCHIVE, "w:xz") as tar:
            for name in names:
                tar.add(tmp_path / "dev.tsv", name)
        return tables.unpack(tmp_path)

    extract = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda tar, path=".", members=None: extract(tar, path, members))
    assert_refusal(r"\.\./evil leads out of the folder", unpack, "glue/RTE/dev.tsv", "../evil")
    assert not [*tmp_path.rglob("evil")]
    assert unpack("glue/RTE/dev.tsv") == {"CLOZE_DATA": str(tmp_path / "data")}
    assert (tmp_path / "data" / "glue" / "RTE" / "dev.tsv").read_text() == "text"


def test_without_data_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOZE_DATA", raising=False)
    assert_refusal("make gpu-text packs it", tables.run, GpuTables("run", tmp_path), QUIET)
