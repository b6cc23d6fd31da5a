"""Small folders of shards, as the real command writes them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from conftest import write_wiki

from data_prep import shard


def make_shards(folder: Path, validation: float = 0.05, documents: int = 600, pairs: str = "nsp") -> Path:
    """Shards of lengths 32 and 64."""
    wiki = write_wiki(folder.with_name(folder.name + "-text"), documents=documents)
    arguments = ["--docs", str(wiki), "--out", str(folder), "--lengths", "32", "64", "--duplicates", "2"]
    sizes = ["--vocab-size", "300", "--shard-size", "64KB", "--validation", str(validation), "--workers", "1"]
    sizes += ["--pairs", pairs]
    with contextlib.redirect_stdout(io.StringIO()):
        assert shard.main([*arguments, *sizes]) == 0
    return folder
