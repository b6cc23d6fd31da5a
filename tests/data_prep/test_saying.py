"""shard.py says what it found and decided, warns of what is likely not meant, and says beforehand what a run takes."""

import gzip
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unicodedata import category

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_wiki
from support.shards import SHORT, command, draw_text, make, read_examples, run, tell, write_rows

from data_prep.arrow_files import map_batches
from data_prep.pipeline.forecast import Amount, Costs, plan_steps
from data_prep.pipeline.steps import Steps
from data_prep.readers.sources import Bundle
from data_prep.settings import Settings
from data_prep.shards import KEPT, Manifest
from data_prep.vocabulary.kinds.declaration import load_vocabulary


def text(seed: int, sentences: int = 12) -> str:
    return draw_text(random.Random(seed), sentences)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a newcomer's own text in four formats, with the text in a field of another name."""
    folder = tmp_path / "mine"
    folder.mkdir()
    posts = [{"body": text(number), "headline": "A post", "n": number} for number in range(20)]
    (folder / "posts.jsonl").write_text("".join(json.dumps(post) + "\n" for post in posts))
    pq.write_table(pa.table({"body": [text(100 + number) for number in range(20)]}), folder / "more.parquet")
    (folder / "book.txt").write_text("\n\n".join(text(200 + number) for number in range(30)))
    (folder / "notes.md").write_text(f"# Notes\n\n{text(300)}\n\n- {text(301)}\n")
    return folder


# What is read


@pytest.mark.parametrize("kind", ["grows", "shrinks", "is replaced"])
def test_changes_meanwhile_are_told(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    book, read, field = mine / "book.txt", Steps.read, ["--text-field", "body"]

    def read_beside_a_writer(steps: Steps, bundles: list[Bundle]) -> Any:
        if kind == "grows":
            book.write_text(book.read_text() + "\n\nAnd one more sentence.")
            return read(steps, bundles)
        records = read(steps, bundles)
        (mine / "new").write_text("Another." if kind == "shrinks" else book.read_text())
        (mine / "new").replace(book)
        return records

    with monkeypatch.context() as patched:
        patched.setattr(Steps, "read", read_beside_a_writer)
        said = run(mine, tmp_path / "out", *field, "--documents-only")
    assert re.findall("^(.*) changed while", said, re.MULTILINE) == [f"warning: {book}"]
    assert kind != "grows" or "changed while" not in run(mine, tmp_path / "again", *field)


def test_fields_and_formats_by_source(mine: Path, tmp_path: Path) -> None:
    """Fields that no source has are told together, and their cures cure."""
    pq.write_table(pa.table({"content": ["One text. It is short."] * 9, "id": range(9)}), mine / "more.parquet")
    docs = ["--docs", f"posts={mine}/posts.jsonl", f"more={mine}/more.parquet", f"{mine}/book.txt"]
    words = [*docs, *SHORT, "--format", "book=sentences"]
    cures = re.findall(r"--text-field \S+=\S+", tell(tmp_path / "out", *words, code=2))
    assert cures == ["--text-field posts=body", "--text-field more=content"]
    tell(tmp_path / "out", *words, *" ".join(cures).split())
    lines = tell(tmp_path / "short", *words, "--text-field", "posts=body", "content").splitlines()[:3]
    facts = ("jsonl (text in 'body')", "parquet (text in 'content')", "sentences; a sentence a line")
    assert all(fact in line for fact, line in zip(facts, lines, strict=True))
    settings = Manifest.read(tmp_path / "short").settings.as_json()
    assert settings["text_field"] == {"": "content", "posts": "body"}
    assert settings["format"] == {"book": "sentences"}


def test_a_wrong_field_is_no_text_to_skip(mine: Path, tmp_path: Path) -> None:
    """Where all of a format is left out, it is an error; a warning if the source has other documents."""
    (mine / "more.parquet").unlink()
    fault = f"left out: {mine}/posts.jsonl: byte 0: no text in a field 'text'"
    said = run(mine / "posts.jsonl", tmp_path / "posts", "--errors", "skip", code=2)
    facts = ("no document in posts, read as jsonl", fault, "--text-field posts=FIELD")
    assert all(fact in said for fact in facts)
    said = run(mine, tmp_path / "out", "--errors", "skip", "--documents-only")
    facts = ("no document in mine, read as jsonl: all of that is left out", fault, "--text-field mine=FIELD")
    assert all(fact in said for fact in facts)


def test_what_is_no_text_among_texts_is_named_and_can_be_left_out(mine: Path, tmp_path: Path) -> None:
    """An image, and settings of another program, whose JSON begins on a line or is all of one."""
    content = {"hidden_size": 64, "kind": "bert"}
    others = {"photo.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" * 20}
    others |= {f"{indent}.json": json.dumps(content, indent=indent).encode() for indent in (None, 2)}
    for name, file in others.items():
        (mine / name).write_bytes(file)
        out, words = tmp_path / name, ["--docs", mine, "--text-field", "body", "--documents-only"]
        said = tell(out, *words, code=2)
        assert f"{mine}/{name}: {'an image' if name == 'photo.jpg' else ''}" in said
        assert "--errors skip" in said
        assert f"left out: {mine}/{name}: " in tell(out, *words, "--errors", "skip")
        manifest = Manifest.read(out)
        [fault] = manifest.corpus.skipped
        assert fault.startswith(f"mine/{name}: ")
        assert name != "photo.jpg" or name not in {source.name for source in manifest.sources}
        (mine / name).unlink()


def test_sentences_of_german_text_end_by_the_rules_of_german(tmp_path: Path) -> None:
    """Where no language is given, shards are those of English."""
    path = tmp_path / "tag.txt"
    path.write_text("Dr. Huber kam z. B. zu Fuß. Er hatte usw. Prof. Meier dabei.\n\n" * 20)
    languages = {"de": ["--language", "de"], "en": ["--language", "en"], "none": []}
    said = {name: run(path, tmp_path / name, *words) for name, words in languages.items()}
    assert "sentences as in German\n" in said["de"]
    assert "sentences as in English (no --language)\n" in said["none"]
    german, english, none = (Manifest.read(tmp_path / name) for name in languages)
    assert (german.settings.language, none.settings.language) == ("de", None)
    assert german.corpus.sentences == 40
    assert english.corpus.sentences > 40
    assert english.fingerprint == none.fingerprint
    run(path, tmp_path / "en")
    run(path, tmp_path / "none", "--language", "en")
    assert "--language was not given, now de" in run(path, tmp_path / "none", "--language", "de", code=2)


# What is decided


def test_the_vocabulary_asked_for_and_got(wiki: Path, tmp_path: Path) -> None:
    small = run(wiki, tmp_path / "small")
    size = Manifest.read(tmp_path / "small").vocabulary_size
    assert size < 300
    assert f"vocabulary: {size} pieces of 300 asked for; the text is too small for more\n" in small
    assert "vocabulary: 150 pieces of 150 asked for\n" in run(wiki, tmp_path / "a", "--vocab-size", "150")
    given = tmp_path / "a" / "vocab.txt"
    assert f"vocabulary: 150 pieces of {given}, in lower case\n" in run(wiki, tmp_path / "b", "--vocab", str(given))


def test_what_is_held_out(wiki: Path, tmp_path: Path) -> None:
    output = run(wiki, tmp_path / "out", "--validation", "0.04")
    made = (one for one in Manifest.read(tmp_path / "out").figures if not one.duplicate)
    sets = {(one.length, one.validation): one for one in made}
    share = sets[32, True].pieces / (sets[32, True].pieces + sets[32, False].pieces)
    assert 0.02 < share < 0.08
    examples = ", ".join(f"{sets[length, True].examples} of length {length}" for length in (32, 64))
    row = f"held out 10 for validation, {100 * share:.2g}% of the text (4% asked for); examples: {examples}"
    assert row in " ".join(output.split())
    assert f"warning: validation has few examples, so its scores will be rough: {examples}; " in output


def draw_words(draw: random.Random, count: int) -> list[str]:
    return ["".join(draw.choices("abcdefghiklmnoprstu", k=draw.randint(2, 6))) for _ in range(count)]


def change_words(draw: random.Random, words: list[str], count: int) -> list[str]:
    """Changes some of the words; only so many in different places leave half of the shingles."""
    places = draw.sample(range(len(words)), count)
    return [draw_words(draw, 1)[0] if at in places else word for at, word in enumerate(words)]


def in_sentences(words: list[str]) -> str:
    return " ".join(f"{' '.join(words[at : at + 10]).capitalize()}." for at in range(0, len(words), 10))


def list_held_out(folder: Path) -> tuple[set[int], set[int]]:
    """Lists the ids of documents that validation has text of, and those that training has."""
    ids = [int(row["id"]) for row in map_batches(folder / "documents.arrow").read_all().to_pylist()]
    sides: tuple[set[int], set[int]] = set(), set()
    for one in Manifest.read(folder).sets():
        sides[not one.validation].update(ids[row["document"]] for row in read_examples(folder, one))
    return sides


def test_near_copies_may_be_on_both_sides_only_where_none_are_looked_for(tmp_path: Path) -> None:
    """Pairs that have less in common than is left out are held out or trained together."""
    draw = random.Random(3)
    first = [draw_words(draw, 60) for _ in range(100)]
    pairs = [in_sentences(words) for one in first for words in (one, change_words(draw, one, 3))]
    docs = write_rows(tmp_path / "x.jsonl", pairs)
    leak = "near copies of it may be in training (--near-copies 0.8 prevents that)"
    for name, words in {"all": [], "0.6": ["--near-copies", "0.6"], "0.95": ["--near-copies", "0.95"]}.items():
        said = " ".join(tell(tmp_path / name, "--docs", docs, *SHORT, "--validation", "0.2", *words).split())
        held_out, trained = list_held_out(tmp_path / name)
        split = {number // 2 for number in held_out} & {number // 2 for number in trained}
        assert (leak in said, bool(split)) == (name == "all", name == "all")
        assert name != "0.95" or len(held_out) == 40


def test_no_passage_is_held_out_of_a_document_that_has_a_near_copy(tmp_path: Path) -> None:
    draw = random.Random(4)
    books = [draw_words(draw, 4000) for _ in range(12)]
    books += [change_words(draw, book, 200) for book in books[:6]]
    docs = write_rows(tmp_path / "x.jsonl", [in_sentences(book) for book in books])
    for words, single in ([], False), (["--near-copies", "0.95"], True):
        folder = make(tmp_path / str(single), "--docs", docs, *SHORT, "--validation", "0.1", *words)
        held_out, _ = list_held_out(folder)
        assert held_out
        assert (held_out <= set(range(6, 12))) == single


def test_enough_is_held_out_without_a_warning(tmp_path: Path) -> None:
    docs = write_rows(tmp_path / "x.jsonl", [text(number) for number in range(1200)])
    few = tell(tmp_path / "few", "--docs", docs, *SHORT, "--validation", "0.0025")
    enough = few.partition("with --validation ")[2].strip()
    assert "warning: " not in tell(tmp_path / "out", "--docs", docs, *SHORT, "--validation", enough)


def test_what_the_vocabulary_cannot_spell_and_documents_without_text_are_told(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*"[PAD] [UNK] [CLS] [SEP] [MASK] .".split(), *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    rows: list[dict[str, str | None]] = [
        {"text": f"A word of {'привет ' * 9} and {text(number)}", "title": ""} for number in range(30)
    ]
    rows += [{"text": None}, {"text": " \n"}, {"text": "A headline of its own.", "title": "A headline of its own."}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--vocab", tmp_path / "vocab.txt", "--validation", "0")
    said = " ".join(run(tmp_path / "x.jsonl", tmp_path / "out", *words).split())
    assert "left out 3 3 documents without text; bad characters replaced in 0" in said
    corpus = Manifest.read(tmp_path / "out").corpus
    texts = [str(row["text"]) for row in rows if row["text"]]
    assert corpus.characters == sum(len("".join(text.split())) for text in texts[:30])
    assert corpus.unknown_characters == 30 * 9 * len("привет")
    assert f"warning: {100 * corpus.unknown_characters / corpus.characters:.3f}% of the characters are in words" in said
    make(tmp_path / "again", "--from", tmp_path / "out", *SHORT[:4])
    assert Manifest.read(tmp_path / "again").corpus.unknown_characters == corpus.unknown_characters


THAI = "ที่ นี้ น้ำ ผู้ ได้ ให้ เป็น ความ รู้ เด็ก เรียน หนังสือ ประเทศ ไทย บ้าน เมือง คน ดี มาก กิ่ง ดื่ม สิ่ง"


def test_text_of_a_script_without_blanks_is_not_lost(tmp_path: Path) -> None:
    """Nor is a letter parted from the vowel above or below it."""
    draw = random.Random(1)
    lines = ["".join(draw.choices(THAI.split(), k=120)) for _ in range(200)]
    docs = write_rows(tmp_path / "th.jsonl", lines)
    out = tmp_path / "out"
    said = tell(out, "--docs", docs, *SHORT, "--vocab-size", "2000", "--validation", "0", "--cased")
    corpus = Manifest.read(out).corpus
    assert (corpus.characters, corpus.unknown_characters) == (sum(map(len, lines)), 0)
    assert "[UNK]: " not in said
    vocabulary = load_vocabulary(out, cased=True)
    begins = [
        piece for id in vocabulary.encoder().encode_texts(lines).ids if (piece := vocabulary.pieces[id])[0] != "#"
    ]
    assert len(begins) > 3 * len(lines), "every line is cut into words"
    assert not [piece for piece in begins if category(piece[0]).startswith("M")]


RUSSIAN, CAFE = "Мой чай ещё горячий. ", "He met a naïve friend in a café. "


def write_texts(folder: Path) -> list[str]:
    """Writes two sources, en and ru; lower case changes letters in the last file of ru, and too few in en to tell."""
    (folder / "ru").mkdir()
    for name in "abc":
        (folder / "ru" / f"{name}.txt").write_text("\n\n".join(text(ord(name) + number, 20) for number in range(30)))
    (folder / "ru" / "c.txt").write_text((RUSSIAN * 9 + "\n\n") * 30)
    rows = [{"body": f"{CAFE}{text(number, 40)}"} for number in range(20)]
    (folder / "en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--docs", str(folder / "en.jsonl"), f"{folder}/ru", "--text-field", "en=body", *SHORT]


def test_letters_that_lower_case_changes_are_told_before_a_vocabulary_is_trained(tmp_path: Path) -> None:
    """The warning has the source, the counts, an example and the cure; --check prints it too. A café causes none."""
    words = write_texts(tmp_path)
    output = tell(tmp_path / "out", *words)
    [line] = [line for line in output.splitlines() if "lower case" in line]
    told = r"warning: in a sample of ru, lower case strips ([\d,]+) marks from ([\d,]+) letters, such as мой → мои; "
    matched = re.match(f"{told}--cased keeps them$", line)
    assert matched
    assert 0.01 < int(matched[1].replace(",", "")) / int(matched[2].replace(",", "")) < 0.03
    assert output.index(line) < output.index("documents ")
    checks: dict[tuple[object, ...], str] = {(): line, ("--cased",): "", ("--tokenizer", "bytelevel"): ""}
    checks |= {("--vocab", tmp_path / "out"): line.replace("--cased", "a cased vocabulary")}
    for more, warning in checks.items():
        said = tell(tmp_path / "other", *words, "--check", *more)
        assert warning in said if warning else "lower case" not in said


def test_no_warning_tells_of_text_that_filters_leave_out(tmp_path: Path) -> None:
    docs = write_rows(tmp_path / "x.jsonl", [text(number) for number in range(30)] + [RUSSIAN] * 30)
    assert "lower case strips" in run(docs, tmp_path / "all", "--check")
    assert "lower case strips" not in run(docs, tmp_path / "out", "--check", "--min-words", "9")


# What takes time


COMPILING: list[tuple[Any, ...]] = [
    ([("WordPiece", "two minutes")], "--vocab-size", "600"),
    ([], "--vocab-size", "229"),
    ([], "--vocab-size", "600", "--lengths", "48"),
    ([("byte-level BPE", "a minute")], "--vocab-size", "600", "--tokenizer", "bytelevel"),
    ([], "--vocab-size", "601", "--tokenizer", "bytelevel", "--lengths", "48"),
]
"""What is said to be compiled by runs that follow each other, and their settings."""


@pytest.mark.slow
def test_loops_are_compiled_once_and_before_the_workers_need_them(wiki: Path, tmp_path: Path) -> None:
    """Though so many pieces are stored in other types the second time, and lengths of one type differ."""
    cache, before = tmp_path / "cache", set[Path]()
    for number, (said, *more) in enumerate(COMPILING):
        words = command(wiki, tmp_path / str(number), "--workers", "2", *more)
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert re.findall("compiling once for (.*) with these settings: up to (.*); ", done.stdout) == said
        assert said or before == {*cache.rglob("*.nbc")}
        before = {*cache.rglob("*.nbc")}
        assert before


def numbers_after(output: str, start: str) -> list[float]:
    line = next(line for line in output.splitlines() if line.startswith(start))
    return [float(word.replace(",", "")) for word in line.split() if word.replace(",", "").replace(".", "").isdigit()]


def test_the_shards_are_as_large_as_the_check_says(tmp_path: Path) -> None:
    """Of compressed text, whose size is not that of its files."""
    wiki, out = write_wiki(tmp_path / "wiki", documents=1500, files=6), tmp_path / "out"
    small = ("--shard-size", "64KB")
    for path in list(wiki.iterdir()):
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    disk = numbers_after(run(wiki, out, "--check", *small), "disk: ")
    assert [path.name for path in tmp_path.iterdir()] == ["wiki"]
    run(wiki, out, *small)
    shards = list(out.rglob("shard-*"))
    assert disk[1] == pytest.approx(sum(path.stat().st_size for path in shards) / 1e6, rel=0.15)
    assert disk[2] == pytest.approx(len(shards), abs=2)


def test_everything_grows_with_the_text_alone() -> None:
    """From 20 GB to ten terabytes a byte of text takes no more than at 2 GB, but for one more round of merging."""
    settings = Settings()
    kinds = {"examples-{}": 1e-7, "shards-{}": 3e-8}  # of what was measured, in proportion
    seconds = {step.format(length): cost for step, cost in kinds.items() for length in settings.lengths}
    stored = {f"{step}-{length}": 3.0 for step in ("examples", "shards") for length in settings.lengths}
    costs = Costs({"documents": 1e-7, "tokens": 1e-7, **seconds}, {"documents": 1.03, "tokens": 0.48, **stored})
    each = {}
    for size in (2e9, 2e10, 1e12, 1e13):
        steps = plan_steps(settings, costs, Amount(size), round(size / (16 << 20)))
        each[size] = sum(step.core_seconds for step in steps) / size
        assert max(step.disk for step in steps) < 7.2 * size  # documents in pieces, all shards, a set of examples
        assert sum(step.tasks for step in steps) < 20 * size / (16 << 20) + 500
    assert each[1e13] < 1.6 * each[2e9]
    assert each[1e13] < 1.3 * each[1e12]


def test_a_small_disk_is_told_by_the_check(wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    said = run(wiki, tmp_path / "out", "--check")
    assert f"in {tmp_path / 'out'} at its largest, and 0.0 MB are free" in said


def test_a_check_of_documents_in_pieces_has_no_steps_of_text(tmp_path: Path) -> None:
    """And with weights it says as much more as there will be."""
    wiki = write_wiki(tmp_path / "wiki", documents=1000)
    kept, asked = tmp_path / "kept", ["--from", tmp_path / "kept", "--lengths", "32", "--duplicates", "2"]
    run(wiki, kept, "--documents-only")
    for more in ([], ["--weight", "wiki=3"]):
        out = tmp_path / f"out{len(more)}"
        said = tell(out, *asked, *more, "--check")
        assert not re.search("^(documents|tokens) ", said, re.MULTILINE)
        _, stay = numbers_after(said, "disk: ")[:2]
        tell(out, *asked, *more)
        size = sum(path.stat().st_size for path in out.rglob("shard-*"))
        assert stay == pytest.approx(size / 1e6, rel=0.15)
        assert not (out / KEPT).exists()
