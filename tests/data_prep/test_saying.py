"""shard.py says what it found and decided, warns of what is likely not meant, and its cures cure."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import sentence
from support.sharding import SETTINGS, command, run

from data_prep import shard
from data_prep.readers.sources import Bundle
from data_prep.shards import Manifest
from data_prep.steps import Steps

JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" * 20


def text(seed: int, sentences: int = 20) -> str:
    draw = random.Random(seed)
    return " ".join(sentence(draw) for _ in range(sentences))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a newcomer's own text in four formats, with the text in a field of another name."""
    folder = tmp_path / "mine"
    folder.mkdir()
    posts = [{"body": text(number), "headline": "A post", "n": number} for number in range(60)]
    (folder / "posts.jsonl").write_text("".join(json.dumps(post) + "\n" for post in posts))
    pq.write_table(pa.table({"body": [text(100 + number) for number in range(60)]}), folder / "more.parquet")
    (folder / "book.txt").write_text("\n\n".join(text(200 + number) for number in range(30)))
    (folder / "notes.md").write_text(f"# Notes\n\n{text(300)}\n\n- {text(301)}\n")
    return folder


def said(capfd: pytest.CaptureFixture[str], docs: Path | str, out: Path, *more: str, code: int = 0) -> str:
    """What a run prints, to its output or as its error."""
    capfd.readouterr()
    assert run(Path(docs), out, *more) == code
    captured = capfd.readouterr()
    return captured.err if code else captured.out


# What is read


@pytest.mark.parametrize("kind", ["grows", "shrinks", "is replaced"])
def test_a_file_that_changes_while_it_is_read_is_told(
    mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    book, read, field = mine / "book.txt", Steps.read, ["--text-field", "body"]

    def read_beside_a_writer(steps: Steps, bundles: list[Bundle]) -> Any:
        if kind == "grows":
            book.write_text(book.read_text() + "\n\nAnd one more sentence.")
            return read(steps, bundles)
        records = read(steps, bundles)
        (mine / "new").write_text("Another." if kind == "shrinks" else book.read_text())
        (mine / "new").replace(book)
        return records

    monkeypatch.setattr(Steps, "read", read_beside_a_writer)
    lines = [line for line in said(capfd, mine, tmp_path / "out", *field).splitlines() if "changed while" in line]
    assert [line.split(" changed while")[0] for line in lines] == [f"warning: {book}"]
    monkeypatch.undo()
    assert "changed while" not in said(capfd, mine, tmp_path / "again", *field)


def test_a_line_for_each_source_in_every_run(mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = (
        f"mine: 4 files, {sum(path.stat().st_size for path in mine.iterdir()) / 1e6:.2f} MB: "
        "1 parquet (by content, text in 'body'), 1 jsonl (by content, text in 'body'), 2 text (by name); "
        "sentences as in German\n"
    )
    flags = ["--text-field", "body", "--language", "de"]
    assert said(capfd, mine, tmp_path / "out", *flags).startswith(lines)
    again = said(capfd, mine, tmp_path / "out", *flags)
    assert again.startswith(lines)
    assert "vocabulary: " in again
    assert "held out" in again
    assert "warning: " in again


def test_fields_and_formats_by_source(mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"content": ["One text. It is short."] * 9, "id": range(9)}), mine / "more.parquet")
    docs = [f"posts={mine}/posts.jsonl", f"more={mine}/more.parquet", f"{mine}/book.txt"]
    flags = ["--text-field", "posts=body", "content", "--format", "book=sentences"]
    assert shard.main(["--docs", *docs, "--out", str(tmp_path / "out"), "--workers", "1", *SETTINGS, *flags]) == 0
    lines = capfd.readouterr().out.splitlines()[:3]
    assert [line.split(": ")[-1].partition(";")[0] for line in lines] == [
        "jsonl (by content, text in 'body')",
        "parquet (by content, text in 'content')",
        "sentences (as --format says)",
    ]
    assert lines[2].endswith("; a sentence a line")
    settings = Manifest.read(tmp_path / "out").settings.as_json()
    assert settings["text_field"] == {"": "content", "posts": "body"}
    assert settings["format"] == {"book": "sentences"}


def test_fields_that_no_source_has_are_told_together_and_their_cures_cure(
    mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"content": ["One text. It is short."] * 9, "id": range(9)}), mine / "more.parquet")
    docs = [f"posts={mine}/posts.jsonl", f"more={mine}/more.parquet", f"{mine}/book.txt"]
    command = ["--docs", *docs, "--out", str(tmp_path / "out"), "--workers", "1", *SETTINGS]
    assert shard.main(command) == 2
    cures = re.findall(r"--text-field \S+=\S+", capfd.readouterr().err)
    assert cures == ["--text-field posts=body", "--text-field more=content"]
    assert shard.main([*command, *" ".join(cures).split()]) == 0


def test_fields_by_source_may_stand_in_a_file(mine: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'docs = ["{mine}"]\ntext-field = ["mine=body"]\nformat = "text"\n')
    arguments = ["--config", str(config), "--out", str(tmp_path / "out"), "--workers", "1", *SETTINGS]
    assert shard.main([*arguments, "--text-field", "mine=headline"]) == 2  # flags come before the file
    assert shard.main(arguments) == 0
    settings = Manifest.read(tmp_path / "out").settings.as_json()
    assert (settings["text_field"], settings["format"]) == ({"": "text", "mine": "body"}, "text")


def test_a_wrong_field_is_no_text_to_skip(mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where all of a format is left out, it is an error; a warning if the source has other documents."""
    (mine / "more.parquet").unlink()
    message = said(capfd, mine / "posts.jsonl", tmp_path / "posts", "--errors", "skip", code=2)
    assert message.startswith(f"error: no document in posts, read as jsonl\n  left out: {mine}/posts.jsonl: line 1: no")
    assert "--text-field posts=FIELD" in message
    output = said(capfd, mine, tmp_path / "out", "--errors", "skip")
    assert "warning: no document in mine, read as jsonl: all of that is left out" in output
    assert "--text-field mine=FIELD" in output
    assert f"left out: {mine}/posts.jsonl: line 1: no field 'text'" in output


@pytest.mark.parametrize("indent", [None, 2])
def test_settings_of_another_program_among_texts_can_be_left_out(
    indent: int | None, mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("posts.jsonl", "more.parquet"):
        (mine / name).unlink()
    (mine / "config.json").write_text(json.dumps({"hidden_size": 64, "kind": "bert"}, indent=indent))
    assert "--errors skip leaves" in said(capfd, mine, tmp_path / "out", code=2)
    output = said(capfd, mine, tmp_path / "out", "--errors", "skip")
    assert f"left out: {mine}/config.json: " in output
    (fault,) = Manifest.read(tmp_path / "out").corpus.skipped
    assert fault.startswith("mine/config.json: ")


def test_many_sources_do_not_fill_the_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    docs = []
    for number in range(23):
        docs.append(f"s{number}={tmp_path}/{number}.txt")
        (tmp_path / f"{number}.txt").write_text(text(number))
    assert shard.main(["--docs", *docs, "--out", str(tmp_path / "out"), "--workers", "1", *SETTINGS]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[19].startswith("s19: 1 file, ")
    assert lines[20].startswith("and 3 more sources: 3 files, ")


def test_an_image_among_texts_is_named_and_can_be_left_out(
    mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (mine / "photo.jpg").write_bytes(JPEG)
    message = said(capfd, mine, tmp_path / "out", "--text-field", "body", code=2)
    assert f"{mine}/photo.jpg: a JPEG image" in message
    assert "--errors skip" in message
    output = said(capfd, mine, tmp_path / "out", "--text-field", "body", "--errors", "skip")
    assert f"left out: {mine}/photo.jpg: a JPEG image\n" in output
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.corpus.skipped == ["mine/photo.jpg: a JPEG image"]
    assert "photo.jpg" not in {source.name for source in manifest.sources}
    globs = shlex.split(message[message.index("--docs '") :])
    arguments = [*globs, "--text-field", "body", "--out", str(tmp_path / "globs"), "--workers", "1", *SETTINGS]
    assert shard.main(arguments) == 0
    by_glob = Manifest.read(tmp_path / "globs").sources
    assert sorted(map(str, by_glob)) == sorted(map(str, manifest.sources))


def test_sentences_of_german_text_end_by_the_rules_of_german(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tag.txt"
    path.write_text("Dr. Huber kam z. B. zu Fuß. Er hatte usw. Prof. Meier dabei.\n\n" * 20)
    assert "sentences as in German\n" in said(capfd, path, tmp_path / "de", "--language", "de")
    assert "sentences as in English (no --language)\n" in said(capfd, path, tmp_path / "en")
    german, english = (Manifest.read(tmp_path / name) for name in ("de", "en"))
    assert (german.settings.language, english.settings.language) == ("de", None)
    assert german.corpus.sentences == 40
    assert english.corpus.sentences > 40


def test_a_language_that_is_not_given_makes_the_shards_of_english(
    wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(wiki, tmp_path / "en", "--language", "en") == run(wiki, tmp_path / "none") == 0
    english, none = (Manifest.read(tmp_path / name) for name in ("en", "none"))
    assert english.fingerprint == none.fingerprint
    assert none.settings.language is None
    assert run(wiki, tmp_path / "en") == 0
    assert run(wiki, tmp_path / "none", "--language", "en") == 0
    assert run(wiki, tmp_path / "none", "--language", "de") == 2
    assert "--language was not given, now de" in capfd.readouterr().err


# What is decided


def test_the_vocabulary_asked_for_and_got(wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = said(capfd, wiki, tmp_path / "small")
    size = Manifest.read(tmp_path / "small").vocabulary_size
    assert size < 300
    assert f"vocabulary: {size} pieces of 300 asked for; the text is too small for more\n" in small
    assert "vocabulary: 150 pieces of 150 asked for\n" in said(capfd, wiki, tmp_path / "a", "--vocab-size", "150")
    given = tmp_path / "a" / "vocab.txt"
    assert f"vocabulary: 150 pieces of {given}, in lower case\n" in said(
        capfd, wiki, tmp_path / "b", "--vocab", str(given)
    )


def table_row(output: str, name: str) -> str:
    return " ".join(next(line for line in output.splitlines() if line.strip().startswith(name)).split())


def test_what_is_held_out(wiki: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = said(capfd, wiki, tmp_path / "out", "--validation", "0.04")
    made = (one for one in Manifest.read(tmp_path / "out").figures if not one.duplicate)
    sets = {(one.length, one.validation): one for one in made}
    share = sets[32, True].pieces / (sets[32, True].pieces + sets[32, False].pieces)
    assert 0.02 < share < 0.08
    examples = ", ".join(f"{sets[length, True].examples} of length {length}" for length in (32, 64))
    assert table_row(output, "held out") == (
        f"held out 10 for validation, {100 * share:.2g}% of the text (4% asked for); examples: {examples}"
    )
    assert f"warning: validation has few examples, so its scores will be rough: {examples}; " in output


def test_enough_is_held_out_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = "".join(json.dumps({"text": text(number, 10)}) + "\n" for number in range(2500))
    (tmp_path / "x.jsonl").write_text(lines)
    few = said(capfd, tmp_path / "x.jsonl", tmp_path / "few", "--validation", "0.0025")
    enough = few.partition("; --validation ")[2].partition(" holds out enough")[0]
    assert "warning: " not in said(capfd, tmp_path / "x.jsonl", tmp_path / "out", "--validation", enough)


def test_copies_of_what_is_held_out_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = [text(1), text(2), text(3)] * 20
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    output = said(capfd, tmp_path / "x.jsonl", tmp_path / "out")
    assert table_row(output, "held out").startswith("held out 20 ")
    assert "20 documents are held out where 1 would do, since copies of a text go together" in output
    assert "% of the text from training" in output


def test_a_large_document_held_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").mkdir()
    for number in range(3):
        (tmp_path / "x" / f"{number}.txt").write_text("\n\n".join(text(10 * number + n) for n in range(9)))
    output = said(capfd, tmp_path / "x", tmp_path / "out")
    assert "of the text from training: 1 of 3 documents is as large as that; cut long documents" in output


def test_nothing_is_held_out(wiki: Path, mine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    none = said(capfd, wiki, tmp_path / "none", "--validation", "0")
    assert table_row(none, "held out") == "held out 0 nothing for validation (--validation 0)"
    assert "warning" not in none
    one = said(capfd, mine / "book.txt", tmp_path / "one")
    assert table_row(one, "held out") == "held out 0 nothing for validation"
    assert "warning: nothing is held out for validation: there is one document, and a short one; take more text" in one


# What takes time


@pytest.mark.slow
def test_loops_are_compiled_once_and_before_the_workers_need_them(wiki: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}

    def prepare(name: str) -> str:
        more = ["--workers", "2", "--vocab-size", "600"]
        done = subprocess.run(
            command(wiki, tmp_path / name, *more), env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    from_main = "import sys; from data_prep.trial import rehearse; from data_prep.settings import *; "
    from_main += "from rich.console import Console; s = Settings(lengths=(32, 64)); "
    from_main += "from pathlib import Path; said = False\nfor size in (600, 229):\n"
    from_main += f" said = rehearse(s, size, Path({str(tmp_path)!r}), Console(), said)"
    first = subprocess.run(
        [sys.executable, "-c", from_main],
        env={**environment, "TMPDIR": "/proc"},  # where nothing can be written
        capture_output=True,
        text=True,
        check=True,
    )
    assert first.stdout.count("compiling, once") == 1  # though so many pieces are stored in other types
    before = set(cache.rglob("*.nbc"))
    assert before
    assert "compiling" not in prepare("out")
    assert set(cache.rglob("*.nbc")) == before
