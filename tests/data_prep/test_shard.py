"""shard.py as its users run it: what it refuses, what it leaves alone, and texts that are odd."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import WORDS, sentence
from support.sharding import SETTINGS, SHARD, run

from data_prep import shard
from data_prep.shards import Manifest


def test_a_finished_folder_is_left_as_it_is(wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(wiki, tmp_path / "out") == 0
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert run(wiki, tmp_path / "out") == 0
    assert "is complete already; nothing to do" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()} == times


def test_the_folder_is_named_after_the_text(wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shard.main(["--docs", str(wiki), "--workers", "1", *SETTINGS]) == 0
    assert Manifest.read(tmp_path / "data" / "wiki").corpus.documents == 200


def test_unreadable_files_can_be_left_out_in_a_second_attempt(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = wiki / "wiki_01"
    bad.write_bytes(bad.read_bytes().replace(b"Article 5\n", b"Article \xff5\n"))
    assert run(wiki, tmp_path / "out") == 2
    message = capfd.readouterr().err
    assert f"{bad}: byte" in message
    assert "not UTF-8" in message
    assert run(wiki, tmp_path / "out", "--errors", "skip") == 0
    corpus = Manifest.read(tmp_path / "out").corpus
    assert corpus.documents == 199
    assert corpus.skipped[0].startswith("wiki/wiki_01: byte ")


def test_text_without_a_single_piece_stops_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nul.txt").write_bytes(b"\0\0\0\n\n\0\0")
    assert run(tmp_path / "nul.txt", tmp_path / "out") == 2
    assert "nul.txt: no text but binary data" in capfd.readouterr().err
    (tmp_path / "bell.txt").write_bytes(b"\7\7\7\n\n\7\7")
    assert run(tmp_path / "bell.txt", tmp_path / "out") == 2
    assert "no document has any text in it" in capfd.readouterr().err


def peak_mb(arguments: list[str]) -> tuple[int, float]:
    """Runs with one worker; returns the exit code, and the most memory that the run took.

    The process itself is asked while it runs: what `wait4` reports may be the memory of its parent before the exec.
    """
    process = subprocess.Popen([sys.executable, SHARD, *arguments, "--workers", "1"], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        time.sleep(0.05)
    return process.returncode, peak / 1024


def one_line(path: Path, megabytes: int) -> Path:
    draw = random.Random(1)
    text = " ".join(sentence(draw) for _ in range(10_000)) + " "
    with path.open("w") as file:
        for _ in range(megabytes * 1_000_000 // len(text)):
            file.write(text)
    return path


@pytest.mark.slow
def test_a_document_of_ten_megabytes_on_one_line(tmp_path: Path) -> None:
    path = one_line(tmp_path / "line.txt", 10)
    arguments = ["--docs", str(path), "--out", str(tmp_path / "out"), "--vocab-size", "300", "--duplicates", "1"]
    code, _ = peak_mb(arguments)
    assert code == 0
    corpus = Manifest.read(tmp_path / "out").corpus
    assert corpus.documents == 1
    assert corpus.sentences > 100_000


@pytest.mark.slow
def test_a_document_of_a_hundred_megabytes_on_one_line_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    path = one_line(tmp_path / "line.txt", 100)
    code, peak = peak_mb(["--docs", str(path), "--out", str(tmp_path / "out"), "--vocab-size", "300"])
    assert code == 0
    assert peak < 1024


@pytest.mark.parametrize("text", ["x" * 10_000_000, "中文" * 1_000_000, "é" * 1_000_000, "." * 3_000_000])
def test_text_without_any_space_is_no_trouble(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_text("An ordinary sentence. And another one.\n\n" + text)
    assert run(tmp_path / "odd.txt", tmp_path / "out") == 0


def test_documents_of_one_word_each(tmp_path: Path) -> None:
    lines = "\n\n".join(WORDS)
    (tmp_path / "words.txt").write_text(lines)
    assert run(tmp_path / "words.txt", tmp_path / "out", "--format", "sentences") == 0
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.corpus.documents == len(set(WORDS)) == len(WORDS)
    assert manifest.figures[0].random_next == manifest.figures[0].examples


def test_a_folder_with_other_files_is_left_alone(wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "project" / "work"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("chapter one")
    assert run(wiki, tmp_path / "project") == 2
    assert "holds other files already" in capfd.readouterr().err
    assert (mine / "thesis.txt").read_text() == "chapter one"


def test_a_source_without_documents_leaves_nothing_behind(wiki: Path, tmp_path: Path) -> None:
    blank = tmp_path / "blank"
    blank.mkdir()
    (blank / "blank.md").write_text("# only\n\n## headings\n")
    assert run(blank, tmp_path / "out") == 2
    assert run(wiki, tmp_path / "out") == 0
