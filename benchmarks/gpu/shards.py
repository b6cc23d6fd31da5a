#!/usr/bin/env python3
"""Makes the shards that `make gpu` trains on, unless they are there: some megabytes of text at 128 and 512.

    python benchmarks/gpu/shards.py --shards build/gpu-shards

The text is that in the folder that CLOZE_DATA names, or else the demo corpus, which every machine has.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from benchmarks.gpu.install import PREPARING
from benchmarks.measure import DATA, run_command, write_results
from benchmarks.peer import LENGTHS, make_shards
from data_prep.common.errors import UserError
from data_prep.shards import MANIFEST, Manifest

FILES = "wiki/AA/wiki_0*"
"""Of the real text: 5 MB, which are 12,000 sequences at 128."""


@dataclass(frozen=True)
class Shards:
    """Makes shards to measure on."""

    shards: Path
    """Folder for them."""
    data: Path = DATA
    """Folder of real text with wiki/ and vocab.txt."""
    out: Path | None = None
    """File for what is in them."""


def ensure_shards(shards: Path, data: Path) -> dict[str, Any]:
    """Makes the shards where they are missing, and says what they are."""
    if not (shards / MANIFEST).exists():
        missing = [name for name in PREPARING if find_spec(name) is None]
        if missing:
            raise UserError(
                f"{shards}: is missing, and {', '.join(missing)} to make it\n"
                f"make gpu-wheels prepares it on a machine with a network"
            )
        if (data / "wiki").is_dir():
            make_shards(shards, "--docs", data / FILES, "--vocab", data / "vocab.txt", *LENGTHS)
        else:
            make_shards(shards, "--docs", "demo")
    manifest = Manifest.read(shards)
    size = sum(path.stat().st_size for path in shards.rglob("*") if path.is_file())
    return {"vocabulary": manifest.vocabulary_size, "fingerprint": manifest.fingerprint, "mib": round(size / 2**20, 1)}


def run(settings: Shards, console: Console) -> None:
    """Makes the shards, and says what they are."""
    found = ensure_shards(settings.shards, settings.data)
    if settings.out is not None:
        write_results(settings.out, found)
    console.print(f"{settings.shards}: {found['mib']} MiB of shards with {found['vocabulary']:,} pieces of vocabulary")


if __name__ == "__main__":
    run_command(Shards, run)
