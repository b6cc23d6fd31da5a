"""One bad file loses no run of shard.py, and a file that has changed is seen when a run is continued."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_wiki
from support.sharding import interrupted_at, run, tree

from data_prep.running import Runner
from data_prep.shards import MANIFEST, Manifest


def lines(folder: Path) -> bytes:
    """The text of a small wiki as JSON lines."""
    texts = [path.read_text() for path in sorted(write_wiki(folder, documents=120).iterdir())]
    documents = [text.partition(">")[2] for file in texts for text in file.split("</doc>") if text.strip()]
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder with good text and all kinds of damage."""
    text, folder = lines(tmp_path / "wiki"), tmp_path / "bad"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(text)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text)[:-2000])
    streams = [bz2.compress(text[at : at + 5000]) for at in range(0, len(text), 5000)]
    (folder / "c.jsonl.bz2").write_bytes(b"".join(streams)[: -len(streams[-1]) - 10])
    (folder / "d: 1.jsonl.gz").write_bytes(b"no gzip")
    pq.write_table(pa.table({"id": ["1"] * 300, "text": ["Some text. And more of it."] * 300}), folder / "e.parquet")
    (folder / "f.parquet").write_bytes((folder / "e.parquet").read_bytes()[:-9])
    (folder / "g.jsonl").symlink_to("g.jsonl")
    os.mkfifo(folder / "h.jsonl")
    return folder


def test_a_run_over_damaged_files(bad: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "elsewhere" / "bad"
    copy.parent.mkdir()
    shutil.copytree(bad, copy, symlinks=True, ignore=shutil.ignore_patterns("h.*"))
    os.mkfifo(copy / "h.jsonl")
    assert run(bad, tmp_path / "out", "--errors", "skip") == 0
    assert run(copy, tmp_path / "2", "--errors", "skip", "--workers", "2") == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "2")
    corpus = Manifest.read(tmp_path / "out").corpus
    skipped = sorted(fault.split(" (after")[0] for fault in corpus.skipped)
    at = (bad / "c.jsonl.bz2").read_bytes().rindex(b"BZh9")
    assert skipped == [
        "bad/b.jsonl.gz: truncated or damaged .gz: the stream at byte 0: it does not end",
        f"bad/c.jsonl.bz2: truncated or damaged .bz2: the stream at byte {at:,}: it does not end",
        "bad/d: 1.jsonl.gz: truncated or damaged .gz, or not compressed at all",
        "bad/f.parquet: a Parquet or Arrow file that is not whole",
        "bad/g.jsonl: cannot be read: Too many levels of symbolic links",
        "bad/h.jsonl: a pipe",
    ]
    assert corpus.documents > 120 + 80 + 80 + 300
    said = capfd.readouterr().out
    assert f"left out: {bad}/b.jsonl.gz: truncated" in said
    # of which each may be one document, or all of a file
    assert re.search(rf"left out +{len(skipped)}\+ +{len(skipped)} unreadable places, each a document or more", said)


def test_each_bad_file_names_the_way_to_leave_it_out(
    bad: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in sorted(bad.iterdir()):
        if path.name in ("a.jsonl", "e.parquet"):
            continue
        folder = tmp_path / path.stem
        folder.mkdir()
        path.rename(folder / path.name)
        shutil.copy(bad / "a.jsonl", folder / "z.jsonl")
        assert run(folder, tmp_path / "out") == 2, path
        message = capfd.readouterr().err
        assert f"{folder}/{path.name}: " in message
        assert "--errors skip " in message
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_a_file_that_is_gone_when_its_turn_comes(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Runner.run

    def lose_one(self: Runner, *arguments: Any, **more: Any) -> object:
        (wiki / "wiki_02").unlink(missing_ok=True)
        return step(self, *arguments, **more)

    monkeypatch.setattr(Runner, "run", lose_one)
    text = (wiki / "wiki_02").read_text()
    assert run(wiki, tmp_path / "out") == 2
    message = capfd.readouterr().err
    assert f"{wiki}/wiki_02: cannot be read: No such file or directory\n--errors skip leaves it out" in message
    (wiki / "wiki_02").write_text(text)
    assert run(wiki, tmp_path / "skip", "--errors", "skip") == 0
    corpus = Manifest.read(tmp_path / "skip").corpus
    assert corpus.skipped == ["wiki/wiki_02: cannot be read: No such file or directory"]
    assert corpus.documents == 150


def edit(path: Path) -> None:
    """Changes a file and keeps its size, its name and its date."""
    status = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b" the ", b" his ", 1))
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("finished", [True, False])
def test_an_edited_file_is_seen_and_a_touched_one_is_the_same(
    finished: bool, wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with nullcontext() if finished else interrupted_at("tokens"):
        assert run(wiki, out) == (0 if finished else 130)
    copy = tmp_path / "copy" / "wiki"
    shutil.copytree(wiki, copy, copy_function=shutil.copyfile)  # with other dates
    edit(wiki / "wiki_01")
    if finished:
        assert run(wiki, out) == 2
        assert "--docs: 1 files differ, such as wiki_01" in capfd.readouterr().err
        assert run(copy, out) == 0
    else:
        assert run(wiki, out) == 0
        assert "changed since the run began: wiki_01;" in capfd.readouterr().out
        assert run(copy, out) == 2
    for file in json.loads((out / MANIFEST).read_text())["sources"]:
        assert sorted(file) == ["content", "format", "name", "size", "source"]
