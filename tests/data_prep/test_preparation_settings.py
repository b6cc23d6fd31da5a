"""shard.py as its users run it: settings from flags and files, what it refuses, and texts that are odd."""

import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import WORDS, sentence, write_wiki
from support.commands import run_main
from support.shards import SHORT, command, make, run

from data_prep import shard
from data_prep.common.errors import UserError
from data_prep.settings import find_faults, read_config
from data_prep.shards import Manifest


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    """A small text, in the folder `wiki`."""
    return write_wiki(tmp_path / "wiki", documents=12, files=1)


def test_settings_of_a_file_yield_to_flags(wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --out, the folder is named after the text."""
    config = tmp_path / "shards.toml"
    few = "lengths = [32]\nduplicates = 3\nvocab-size = 300\nworkers = 1\nmask_rate = 0.2"
    config.write_text(f'docs = ["{wiki}"]\n{few}\n')
    monkeypatch.chdir(tmp_path)
    run_main(shard.main, "--config", config, "--duplicates", "1")
    settings = Manifest.read(tmp_path / "data" / "wiki").settings
    assert (settings.lengths, settings.duplicates, settings.mask_rate) == ([32], 1, 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to read"),
        ("--docs nowhere", "--docs nowhere: no such file or folder"),
        ("--docs wiki --lengths 4 8193", "--lengths 8193: from 8 to 8192"),
        ("--docs wiki --shard-size bananas", "--shard-size bananas: a number and a unit"),
        ("--docs wiki --validation 1", "--validation 1.0: a share from 0, below 1"),
        ("--docs wiki --mask-rate nan", "--mask-rate nan: a share between 0 and 1"),
        ("--docs wiki --config nowhere.toml", "--config nowhere.toml: no such file"),
        ("--docs wiki --vocab-size=99", "--vocab-size 99: from 100 to 1000000; 30522 is usual"),
        ("--docs wiki --extend 5", "--extend 5: extends a vocabulary that exists; name it: --vocab"),
        ("--docs wiki --vocab x --extend -1", "--extend -1: from 0"),
        ("--docs wiki --format wiki=word", "--format wiki=word: there is mediawiki"),
        ("--docs wiki --format wien=text", "--format wien=text: there is no source wien, only wiki"),
        ("--docs wiki --text-field wien=x", "--text-field wien=x: there is no source wien, only wiki"),
        ("--docs wiki --text-field a --text-field b", "--text-field a b: once for"),
        ("--docs wiki --language german", "--language german: no language of this code"),
        ("--docs wiki --weight wiki=0", "--weight wiki=0: NAME=WEIGHT above 0, up to 20"),
        ("--docs wiki --weight wiki=20.1", "--weight wiki=20.1: NAME=WEIGHT above 0, up to 20"),
        ("--docs wiki --weight wiki=nan", "--weight wiki=nan: NAME=WEIGHT"),
        ("--docs wiki --weight 2", "--weight 2: NAME=WEIGHT"),
        ("--docs wiki --weight wiki=2 wiki=3", "--weight wiki=2 wiki=3: once for each source"),
        ("--docs wiki --max-share 0.5", "--max-share 0.5: NAME=SHARE, such as wiki=0.5"),
        ("--docs wiki --max-share wiki=1", "--max-share wiki=1: NAME=SHARE"),
        ("--docs wiki --max-share wiki=", "--max-share wiki=: NAME=SHARE"),
        ("--docs wiki --max-share wien=0.5", "there is no source wien, only wiki"),
        ("--docs wiki --near-copies 0.49", "--near-copies 0.49: from 0.5, below 1"),
        ("--docs wiki --near-copies 1", "--near-copies 1.0: from 0.5, below 1"),
        ("--docs wiki --near-copies nan", "--near-copies nan: from 0.5, below 1"),
        ("--docs wiki --min-words 0", "--min-words 0: at least 1"),
        ("--docs wiki --max-words -1", "--max-words -1: at least 1"),
        ("--docs wiki --min-words 9 --max-words 8", "--max-words 8: not below --min-words 9"),
        ("--docs wiki --min-letters 1.1", "--min-letters 1.1: a share above 0, up to 1"),
        ("--docs wiki --min-letters nan", "--min-letters nan: a share above 0"),
        ("--docs wiki --max-repeated-lines 1", "--max-repeated-lines 1.0: a share from 0, below 1"),
        ("--docs wiki --max-repeated-lines -0.1", "--max-repeated-lines -0.1: a share from 0"),
        ("--docs wiki --without-words nowhere.txt", "--without-words nowhere.txt: cannot be read: No such file"),
        ("--docs wiki --without-words .", "--without-words .: cannot be read: Is a directory"),
        ("--docs wiki --only-language klingon", "--only-language klingon: the model knows"),
    ],
)
def test_bad_settings_are_refused(arguments: str, message: str, wiki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wiki.parent)
    assert message in run_main(shard.main, *arguments.split(), "--workers", "1", code=2)
    assert not Path("data").exists()


def test_all_faults_of_the_settings_are_reported_at_once() -> None:
    message = run_main(shard.main, "--docs", "x", "--duplicates", "0", "--mask-rate", "2", "--seed", "-1", code=2)
    assert all(flag in message for flag in ("--duplicates 0", "--mask-rate 2", "--seed -1"))


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("lenghts = [128]\nmasking = 3\n")
    message = run_main(shard.main, "--config", tmp_path / "c.toml", code=2)
    assert "lenghts: unknown; did you mean lengths?" in message
    assert "masking = 3: should be 'token' or 'whole-word'" in message


def test_values_of_a_file_must_be_of_their_kind(tmp_path: Path) -> None:
    allowed = ["workers = 2", "cased = true", "validation = 0", 'text-field = ["x=body"]', 'text-field = "body"']
    allowed += ["mask-split = [80, 10, 10]"]
    refused = ['workers = "4"', "workers = 1.5", "seed = 1.9", "lengths = [128.7]", "mask-split = [90, 10, 0]"]
    refused += ["cased = 1", 'config = "other.toml"', "vocab-size = 200\nvocab_size = 5000"]

    def is_allowed(line: str) -> bool:
        (tmp_path / "c.toml").write_text(f'docs = ["x"]\n{line}\n')
        try:
            return not find_faults(read_config(tmp_path / "c.toml"))
        except UserError:
            return False

    assert [line for line in allowed + refused if is_allowed(line)] == allowed


def test_a_finished_folder_is_left_as_it_is(wiki: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(wiki, out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert "is complete already; nothing to do" in run(wiki, out, "--formulas", "drop", "--shard-size", "128000")
    said = run(wiki, out, "--seed", "2", "--masking", "whole-word", code=2)
    assert "--seed was 12345, now 2" in said
    assert "--masking was token, now whole-word" in said
    assert "give the same settings to continue, another --out, or remove the folder" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == times


def test_text_without_a_single_piece_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "bell.txt").write_bytes(b"\7\7\7\n\n\7\7")
    assert "no document has any text in it" in run(tmp_path / "bell.txt", tmp_path / "out", code=2)


@pytest.mark.slow
def test_a_document_of_a_hundred_megabytes_on_one_line_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    """The child that works is asked, since the process itself only watches over it."""
    draw, peak = random.Random(1), 0
    text = " ".join(sentence(draw) for _ in range(10_000)) + " "
    (tmp_path / "line.txt").write_text(text * (100_000_000 // len(text)))
    process = subprocess.Popen(command(tmp_path / "line.txt", tmp_path / "out", "--workers", "1"))
    while process.poll() is None:
        for child in psutil.Process(process.pid).children():
            with suppress(OSError):  # it has just ended
                status = Path(f"/proc/{child.pid}/status").read_text()
                peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        time.sleep(0.05)
    assert process.returncode == 0
    assert 0 < peak < 1 << 20  # kilobytes
    corpus = Manifest.read(tmp_path / "out").corpus
    assert corpus.documents == 1
    assert corpus.sentences > 1_000_000


def test_text_without_any_space_is_no_trouble(tmp_path: Path) -> None:
    """What took the square of its length in time would take hours."""
    odd = ["x" * 600_000, "中文" * 60_000, "é" * 60_000, "." * 200_000]
    (tmp_path / "odd.txt").write_text("\n\n".join(["An ordinary sentence. And another one.", *odd]))
    run(tmp_path / "odd.txt", tmp_path / "out")


def test_documents_of_one_word_each(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("\n\n".join(WORDS))
    manifest = Manifest.read(make(tmp_path / "out", "--docs", tmp_path / "words.txt", *SHORT, "--format", "sentences"))
    assert manifest.corpus.documents == len(set(WORDS)) == len(WORDS)
    assert manifest.figures[0].random_next == manifest.figures[0].examples


def test_a_folder_with_other_files_is_left_alone(wiki: Path, tmp_path: Path) -> None:
    mine = tmp_path / "project" / "work"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("chapter one")
    assert "holds other files already" in run(wiki, tmp_path / "project", code=2)
    assert (mine / "thesis.txt").read_text() == "chapter one"
