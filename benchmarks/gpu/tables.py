#!/usr/bin/env python3
"""Makes Table 5 on one GPU in minutes: all models are trained at once, since the host limits each of them.

    python benchmarks/gpu/tables.py pack --out build/gpu-tables
    python benchmarks/gpu/tables.py run --out build/gpu-tables --minutes 9 --copies results

`pack` gathers the data for a machine that has none: the text as documents in pieces, the tasks and the pairs. When the
minutes are over, runs save and stop, and the table is made of those that are done.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

import tyro
from rich.console import Console

from benchmarks.measure import DATA, ROOT, run_command
from benchmarks.processes import Child
from benchmarks.reproduce import LAST_LINES, Reproduce, write_table
from benchmarks.reproduction.declaration import ScaleName, load_table
from benchmarks.reproduction.outcomes import Ledger
from data_prep.common.codes import Code
from data_prep.common.errors import UserError, quote
from data_prep.common.files import is_inside

TABLE = 5
CARRIED = ("glue/STS-B", "glue/SST-2", "glue/MRPC", "glue/RTE", "pairs")
"""Data besides the text."""
ARCHIVE = "data.tar.xz"
MOST = 40
"""Size limit in MiB: a lent machine takes 64 with the tree and few wheels (make gpu-wheels HAS=…)."""

ENDING = 45.0
"""Seconds at the end of the minutes for runs to save and stop, and for the table."""


@dataclass(frozen=True)
class GpuTables:
    """Makes Table 5 on one GPU in minutes."""

    part: tyro.conf.Positional[Literal["pack", "run"]]
    """pack: gather the data; run: make the table."""
    out: Path = Path("build/gpu-tables")
    """Folder for the packed data and the runs."""
    text: tuple[Path, ...] = (DATA / "wiki", DATA / "books")
    """Text of the documents."""
    minutes: float = 9.0
    """Time limit of `run`."""
    scale: ScaleName = "gpu"
    """Scale of the table."""
    shares: int = 9
    """The number of commands that run at once: one for each model."""
    copies: Path | None = None
    """Folder for the table (default: `out`)."""


def pack(settings: GpuTables, console: Console) -> None:
    """Makes documents of the text, and packs them with the tasks into one file."""
    archive = settings.out / ARCHIVE
    with tempfile.TemporaryDirectory() as scratch:
        documents = str(Path(scratch) / "documents")
        words = ["--docs", *map(str, settings.text), "--vocab-size", "8192", "--documents-only", "--out", documents]
        command = [sys.executable, str(ROOT / "data_prep/shard.py"), *words]
        if subprocess.run(command, check=False).returncode:
            raise UserError("no documents were made; the message above says why")
        settings.out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:xz", preset=4) as tar:
            tar.add(documents, "documents")
            for name in CARRIED:
                tar.add(DATA / name, name)
    size = archive.stat().st_size / 2**20
    console.print(f"{size:.1f} MiB  {archive}", markup=False)
    if size > MOST:
        raise UserError(f"{archive}: more than {MOST} MiB; give less text: --text {quote(DATA / 'wiki' / 'AA')}")


def run(settings: GpuTables, console: Console) -> int:
    """Unpacks the data, trains all models at once, and makes the table of the runs that are done in time."""
    end = time.monotonic() + 60 * settings.minutes - ENDING
    os.environ |= {"PYTHONUNBUFFERED": "1", **unpack(settings.out)}
    root, results = settings.out / "made", settings.copies or settings.out
    command = [sys.executable, str(ROOT / "benchmarks/reproduce.py"), "--table", str(TABLE), "--scale", settings.scale]
    names = [f"{number}/{settings.shares}" for number in range(1, settings.shares + 1)]
    said = [deque[str](maxlen=LAST_LINES) for _ in names]
    shares = [
        Child([*command, "--out", str(root), "--share", name], lines.append)
        for name, lines in zip(names, said, strict=True)
    ]
    late = [share for share in shares if share.wait(end - time.monotonic()) is None]
    for share in late:
        share.process.terminate()  # all at the same time: they save
    for share in late:
        share.wait(end + ENDING / 2 - time.monotonic())
    for share in shares:
        share.end()
    failed = [
        f"share {name} failed with {share.process.returncode}: {' '.join(lines)}"
        for name, share, lines in zip(names, shares, said, strict=True)
        if share not in late and share.process.returncode
    ]
    table = load_table(f"table{TABLE}", settings.scale)
    results.mkdir(parents=True, exist_ok=True)
    wanted = Reproduce(table=TABLE, scale=settings.scale, out=root, results=results)
    ledger = Ledger(root / wanted.scale, results, table.name)
    write_table(wanted, table, ledger, not (late or failed), console)
    console.print("\n".join([*failed, *[f"{len(late)} of {len(shares)} shares were not done in time"] * bool(late)]))
    return Code.MISTAKE if failed else Code.STOPPED if late else Code.DONE


def unpack(folder: Path) -> dict[str, str]:
    """Unpacks the data, unless that is done; returns the environment variable of its folder."""
    archive, data = folder / ARCHIVE, folder / "data"
    if not data.exists():
        if not archive.exists():
            if "CLOZE_DATA" in os.environ:
                return {}
            raise UserError(f"{archive}: no such file; make gpu-text packs it on a machine with the data")
        with tempfile.TemporaryDirectory(dir=folder) as scratch, tarfile.open(archive) as tar:
            for member in tar:  # no extractall: before 3.10.12 and 3.11.4 it cannot refuse names with ..
                content, path = tar.extractfile(member), Path(scratch) / "data" / member.name
                if not is_inside(member.name):
                    raise UserError(f"{archive}: {member.name} leads out of the folder; pack it anew: make gpu-text")
                if content is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with content, path.open("wb") as file:
                        shutil.copyfileobj(content, file)
            (Path(scratch) / "data").rename(data)
    return {"CLOZE_DATA": str(data.resolve())}


if __name__ == "__main__":
    run_command(
        GpuTables, lambda settings, console: (pack if settings.part == "pack" else run)(settings, console), "gpu"
    )
