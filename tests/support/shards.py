"""Shards for tests, and runs of shard.py: as a user starts it, and in this process."""

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

import psutil
import pytest
from conftest import ROOT, sentence, write_wiki
from support.commands import run_main, start, wait_for
from support.processes import made_once

from data_prep import shard
from data_prep.arrow_files import read_shard
from data_prep.running import Runner
from data_prep.shards import Manifest, ShardSet
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.work import WorkFolder

SETTINGS = ["--lengths", "32", "64", "--duplicates", "2", "--vocab-size", "300", "--shard-size", "128KB"]
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe"]
SHORT = ["--lengths", "32", "--duplicates", "1", "--vocab-size", "400", "--shard-size", "64KB"]


def tell(out: Path, *words: object, code: int = 0) -> str:
    """Runs shard.py in this process, on one worker if nothing else is said; returns what it says."""
    return run_main(shard.main, "--workers", "1", "--out", out, *words, code=code)


def make(out: Path, *words: object, code: int = 0) -> Path:
    """Does the same; returns the folder of the shards."""
    tell(out, *words, code=code)
    return out


def run(docs: Path | str, out: Path, *more: object, code: int = 0) -> str:
    """Runs shard.py on a small text in this process; returns what it says."""
    return tell(out, "--docs", docs, *SETTINGS, *more, code=code)


def make_shards(folder: Path, validation: float = 0.05, documents: int = 600, pairs: str = "nsp") -> Path:
    """Shards of lengths 32 and 64."""
    wiki = write_wiki(folder.with_name(folder.name + "-text"), documents=documents)
    run(wiki, folder, "--shard-size", "64KB", "--validation", validation, "--pairs", pairs)
    return folder


def make_many_shards(own: Path) -> Path:
    """Shards, many and small, that no test changes, made once for all processes; `own` is the folder of this one."""
    return made_once(own, "many", lambda place: make_shards(place / "shards", documents=1500)) / "shards"


CORPORA = ("wiki", "books", "code")


def make_three_corpora(own: Path) -> Path:
    """Folders of shards of one vocabulary, that no test changes, made once for all processes; the last has no examples
    held out."""

    def make_all(place: Path) -> None:
        vocabulary: list[object] = ["--vocab-size", 300]
        for number, name in enumerate(CORPORA):
            text = write_wiki(place / f"{name}-text", documents=250 * (3 - number), seed=number)
            words = ["--lengths", 32, 64, "--shard-size", "64KB", "--duplicates", 2 - number % 2, *vocabulary]
            make(place / name, "--docs", text, "--validation", 0 if name == "code" else 0.05, *words)
            vocabulary = ["--vocab", place / CORPORA[0]]

    return made_once(own, "corpora", make_all)


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


def draw_text(draw: random.Random, sentences: int) -> str:
    """Some sentences on a line."""
    return " ".join(sentence(draw) for _ in range(sentences))


def write_rows(path: Path, texts: list[str]) -> Path:
    """Writes texts as JSON lines, with their numbers as ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts)))
    return path


def write_sources(folder: Path) -> list[str]:
    """Writes two sources, the second of which has copies of its own documents."""
    write_wiki(folder / "wiki", documents=150)
    draw = random.Random(5)
    rows = [draw_text(draw, 9) for _ in range(75)]
    write_rows(folder / "more" / "rows.jsonl", rows + rows[:15])
    return [str(folder / "wiki"), str(folder / "more")]


def command(corpus: Path, out: Path, *more: str) -> list[str]:
    """Spells the command that a user types."""
    entry = str(ROOT / "data_prep/shard.py")
    return [sys.executable, entry, "--docs", str(corpus), "--out", str(out), *SETTINGS, *more]


def begin(corpus: Path, out: Path) -> tuple[subprocess.Popen[str], psutil.Process, list[psutil.Process]]:
    """Starts a run of two workers, and stops the process that hands out work once some documents are read; returns the
    process that watches over it, that process, and its workers."""
    watching = start(command(corpus, out, "--workers", "2"))

    def find_workers() -> list[psutil.Process]:
        servers = [server for main in psutil.Process(watching.pid).children() for server in main.children()]
        return [worker for server in servers for worker in server.children()]

    wait_for(lambda: WorkFolder(out).read_records("documents") and find_workers())
    [main] = psutil.Process(watching.pid).children()
    main.suspend()
    return watching, main, find_workers()


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
