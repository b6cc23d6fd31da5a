"""Runs of shard.py for tests: as a user starts it, and in this process."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, sentence, write_wiki
from support.commands import run_main, start, wait_for

from data_prep import shard
from data_prep.arrow_files import read_shard
from data_prep.running import Runner
from data_prep.shards import Manifest, ShardSet
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.work import WorkFolder

SHARD = str(ROOT / "data_prep/shard.py")
SETTINGS = ["--lengths", "32", "64", "--duplicates", "2", "--vocab-size", "300", "--shard-size", "128KB"]


def tree(folder: Path) -> dict[str, str]:
    """Hashes every file below a folder, so that folders can be compared."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read_examples(folder: Path, chosen: ShardSet) -> Iterator[dict[str, Any]]:
    """Reads the examples of a set, with the text of A and B as it was before masking."""
    manifest = Manifest.read(folder)
    pieces = load_vocabulary(folder, manifest.vocabulary.cased).pieces
    for record in manifest.sets()[chosen]:
        for row in read_shard(folder / record.path).to_pylist():
            restored = list(row["pieces"])
            for mask in row["masked"]:
                restored[mask["position"]] = mask["piece"]
            words = [pieces[number] for number in restored]
            a, b = words[1 : row["boundary"] - 1], words[row["boundary"] : -1]
            yield {**row, "a": join_pieces(a), "b": join_pieces(b), "restored": words}


def join_pieces(pieces: list[str]) -> str:
    return " ".join(pieces).replace(" ##", "")


def write_sources(folder: Path) -> list[str]:
    """Writes two sources, the second of which has copies of its own documents."""
    write_wiki(folder / "wiki", documents=300)
    draw = random.Random(5)
    rows = [" ".join(sentence(draw) for _ in range(9)) for _ in range(150)]
    rows += rows[:30]
    (folder / "more").mkdir()
    lines = (json.dumps({"text": row, "title": f"More {number}"}) + "\n" for number, row in enumerate(rows))
    (folder / "more/rows.jsonl").write_text("".join(lines))
    return [str(folder / "wiki"), str(folder / "more")]


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, SHARD, "--docs", str(corpus), "--out", str(out), *SETTINGS, *more]


def begin(corpus: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """Starts a run and waits until it has read some documents."""
    process = start(command(corpus, out, "--workers", "2", *more))
    wait_for(lambda: WorkFolder(out).read_records("documents"))
    return process


def run(docs: Path | str, out: Path, *more: object, code: int = 0) -> str:
    """Runs shard.py on a small text in this process; returns what it says."""
    return run_main(shard.main, "--docs", docs, "--out", out, "--workers", "1", *SETTINGS, *more, code=code)


@contextmanager
def interrupted_at(step: str) -> Iterator[None]:
    """Interrupts every run at the first task of a step."""
    usual = Runner.run

    def stop(_: object) -> Any:
        raise KeyboardInterrupt

    def until(self: Runner, one: Any, tasks: Any) -> Any:
        rehearsing = self.work.out.name.startswith("cloze-trial-")
        here = one.name.startswith(step) and not rehearsing
        return usual(self, replace(one, function=stop) if here else one, tasks)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Runner, "run", until)
        yield
