"""shard.py leaves out damaged files, documents that fail filters and near copies; it counts them and shows some."""

import bz2
import csv
import functools
import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_wiki
from support.commands import run_main
from support.shards import SETTINGS, SHORT, draw_text, interrupted_at, make, run, tell, tree, write_rows

from data_prep import verify
from data_prep.arrow_files import map_batches
from data_prep.near_copies.finding import FOUND
from data_prep.running import Runner
from data_prep.seals import FILTERED_REPORT
from data_prep.shards import MANIFEST, NEAR_REPORT, Manifest
from data_prep.work import WorkFolder


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder with good text and all kinds of damage."""
    draw, folder = random.Random(1), tmp_path / "bad"
    texts = [draw_text(draw, draw.randint(2, 20)) for _ in range(120)]
    text = write_rows(tmp_path / "wiki" / "x.jsonl", texts).read_bytes()
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


def test_a_run_over_damaged_files(bad: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "bad"
    copy.parent.mkdir()
    shutil.copytree(bad, copy, symlinks=True, ignore=shutil.ignore_patterns("h.*"))
    os.mkfifo(copy / "h.jsonl")
    said = tell(tmp_path / "out", "--docs", bad, *SHORT, "--errors", "skip")
    tell(tmp_path / "2", "--docs", copy, *SHORT, "--errors", "skip")
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
        "bad/h.jsonl: a pipe, a socket or a device",
    ]
    assert corpus.documents > 120 + 80 + 80 + 300
    assert f"left out: {bad}/b.jsonl.gz: truncated" in said
    # of which each may be one document, or all of a file
    assert re.search(rf"left out +{len(skipped)}\+ +{len(skipped)} unreadable places, each a document or more", said)


def test_what_a_second_name_of_a_file_and_a_list_for_a_text_cost(tmp_path: Path) -> None:
    """A second name costs nothing; a Parquet file with lists is left out as a CSV file without the column is."""
    folder = tmp_path / "some"
    folder.mkdir()
    rows = write_rows(folder / "a.jsonl", [draw_text(random.Random(n), 9) for n in range(60)])
    (folder / "b.jsonl").hardlink_to(rows)
    said = tell(tmp_path / "once", "--docs", folder, *SHORT, "--errors", "skip")
    assert "unreadable" not in said
    assert re.search(r"named again +1 +other names", said)
    pq.write_table(pa.table({"text": [["Some text.", "More."]] * 9}), folder / "c.parquet")
    (folder / "d.csv").write_text("id,body\n1,Some text.\n")
    said = tell(tmp_path / "out", "--docs", folder, *SHORT, "--errors", "skip")
    assert re.search(r"left out +2\+ +2 unreadable places", said)
    once, out = (Manifest.read(tmp_path / name).corpus for name in ("once", "out"))
    assert once.documents == out.documents == 60
    assert once.skipped == ["some/b.jsonl: another name of some/a.jsonl"]
    assert out.unreadable == [
        "some/c.parquet: the field 'text' holds no text; there is: text",
        "some/d.csv: no text in a field 'text'; there is: id, body",
    ]


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    """A small text in four files."""
    return write_wiki(tmp_path / "wiki", documents=40)


def test_a_file_that_is_gone_when_its_turn_comes(wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Runner.run

    def lose_one(self: Runner, *arguments: Any, **more: Any) -> object:
        (wiki / "wiki_02").unlink(missing_ok=True)
        return step(self, *arguments, **more)

    monkeypatch.setattr(Runner, "run", lose_one)
    text = (wiki / "wiki_02").read_text()
    message = run(wiki, tmp_path / "out", code=2)
    assert f"{wiki}/wiki_02: cannot be read: No such file or directory\n--errors skip leaves it out" in message
    (wiki / "wiki_02").write_text(text)
    run(wiki, tmp_path / "skip", "--errors", "skip")
    corpus = Manifest.read(tmp_path / "skip").corpus
    assert corpus.skipped == ["wiki/wiki_02: cannot be read: No such file or directory"]
    assert corpus.documents == 30


def edit(path: Path) -> None:
    """Changes a file and keeps its size, its name and its date."""
    status = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b" the ", b" his ", 1))
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("finished", [True, False])
def test_an_edited_file_is_seen_and_a_touched_one_is_the_same(finished: bool, wiki: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with nullcontext() if finished else interrupted_at("tokens"):
        run(wiki, out, code=0 if finished else 130)
    copy = tmp_path / "copy" / "wiki"
    shutil.copytree(wiki, copy, copy_function=shutil.copyfile)  # with other dates
    edit(wiki / "wiki_01")
    if finished:
        assert "--docs: 1 files differ, such as wiki_01" in run(wiki, out, code=2)
        run(copy, out)
    else:
        assert "changed since the run began: wiki_01;" in run(wiki, out)
        run(copy, out, code=2)
    for file in json.loads((out / MANIFEST).read_text())["sources"]:
        assert sorted(file) == ["content", "format", "name", "size", "source"]


GOOD, BAD = 60, 24  # documents of a source: good ones, and those of each bad kind
SOURCES = ("one", "two")


def draw_lines(draw: random.Random, lines: int) -> list[str]:
    return [draw_text(draw, 3) for _ in range(lines)]


@functools.cache
def texts_of(source: str) -> dict[str, list[str]]:
    """Makes good documents, and bad ones by the filter that they fail first."""
    draw = random.Random(source)
    own: dict[str, Callable[[int], list[str]]] = {
        "min_words": lambda n: [f"Tiny {source} {n}."],
        "max_words": lambda n: [*draw_lines(draw, 40), f"Long {n}."],
        "min_letters": lambda n: [*draw_lines(draw, 4), f"{n} " * 900],
        "max_repeated_lines": lambda n: [*draw_lines(draw, 2) * 3, f"Again {n}."],
        "without_words": lambda n: [*draw_lines(draw, 4), f"A Zwiebelfisch swims {n}."],
    }
    texts = {"good": ["\n".join([*draw_lines(draw, 4), f"Goodly {n}."]) for n in range(GOOD)]}
    return texts | {kind: ["\n".join(write(n)) for n in range(BAD)] for kind, write in own.items()}


FILTERS = {"min_words": "20", "max_words": "1200", "min_letters": "0.5"}
FILTERS |= {"max_repeated_lines": "0.3", "without_words": "WORDS"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes two sources, in which good and bad documents are mixed, and a list of words."""
    folder = tmp_path_factory.mktemp("texts")
    for source in SOURCES:
        of_kinds = texts_of(source).items()
        rows = [{"id": f"{k}-{n}", "title": k, "text": text} for k, own in of_kinds for n, text in enumerate(own)]
        random.Random(1).shuffle(rows)
        (folder / source).mkdir()
        (folder / source / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.txt").write_text("zwiebelfisch\nno such phrase\n")
    return folder


def filters_of(place: Path, *names: str) -> list[str]:
    """Spells filters as flags: all of them, or those that are named."""
    values = {name: value.replace("WORDS", str(place / "words.txt")) for name, value in FILTERS.items()}
    return [word for name in names or values for word in (f"--{name.replace('_', '-')}", values[name])]


def tell_both(place: Path, out: Path, *more: object, code: int = 0) -> str:
    """Runs shard.py on both sources; returns what it says."""
    return tell(out, "--docs", *(place / source for source in SOURCES), *SHORT, *more, code=code)


@pytest.fixture(scope="module")
def made(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    tell_both(place, out, *filters_of(place))
    return out


def report(folder: Path) -> list[dict[str, str]]:
    with (folder / FILTERED_REPORT).open(newline="") as file:
        return list(csv.DictReader(file))


def test_documents_that_fail_are_left_out_and_counted_by_the_first_filter(made: Path) -> None:
    rows = map_batches(made / "documents.arrow").read_all().to_pylist()
    assert [row["title"] for row in rows] == ["good"] * GOOD * len(SOURCES)
    corpus = Manifest.read(made).corpus
    assert corpus.filtered == dict.fromkeys(FILTERS, BAD * len(SOURCES))
    assert corpus.documents == GOOD * len(SOURCES)
    vocabulary = (made / "vocab.txt").read_text().split()
    assert "zwiebelfisch" not in vocabulary
    assert "goodly" in vocabulary
    run_main(verify.main, made)


def test_the_report_shows_twenty_of_each_filter_from_both_sources(made: Path) -> None:
    rows = report(made)
    for name in FILTERS:
        own = [row for row in rows if row["filter"] == f"--{name.replace('_', '-')}"]
        assert len({(row["source"], row["id"]) for row in own}) == len(own) == 20
        assert {row["title"] for row in own} == {name}
        assert {row["source"] for row in own} == set(SOURCES)
        for row in own:
            text = texts_of(row["source"])[name][int(row["id"].split("-")[1])]
            assert row["beginning"] == text.replace("\n", " ")[:200]
    figures = {row["filter"]: row["figure"] for row in rows}
    assert (figures["--min-words"], figures["--without-words"]) == ("3", "zwiebelfisch")
    assert 0.3 < float(figures["--max-repeated-lines"]) < 0.6


def test_filters_of_a_file_and_two_workers_change_nothing(place: Path, made: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "c.toml", tmp_path / "out"
    words = f'without-words = "{place / "words.txt"}"'
    config.write_text(f"min-words = 20\nmax-words = 1200\nmin-letters = 0.5\nmax-repeated-lines = 0.3\n{words}\n")
    said = " ".join(tell_both(place, out, "--config", config, "--workers", "2").split())
    assert tree(out) == tree(made)
    assert f"--min-words {2 * BAD} left out while the text was read; see {FILTERED_REPORT}" in said


def test_a_run_that_is_interrupted_goes_on_with_the_same_filters_alone(place: Path, made: Path, tmp_path: Path) -> None:
    out, other, moved = tmp_path / "out", tmp_path / "other-words.txt", tmp_path / "words.txt"
    with interrupted_at("tokens"):
        tell_both(place, out, *filters_of(place), code=130)
    other.write_text("zwiebelfisch\n")
    said = tell_both(place, out, *filters_of(place), "--min-words", "21", "--without-words", other, code=2)
    assert "--min-words was 20, now 21" in said
    assert "--without-words was 2 words (" in said
    assert "--min-letters was 0.5, now not given" in tell_both(place, out, code=2)
    moved.write_text((place / "words.txt").read_text())
    tell_both(place, out, *filters_of(place), "--without-words", moved)
    assert tree(out) == tree(made)


def test_filters_that_leave_nothing_out_change_no_shard(wiki: Path, tmp_path: Path) -> None:
    plain, idle = tmp_path / "plain", tmp_path / "idle"
    run(wiki, plain)
    run(wiki, idle, "--min-words", "1")
    others = dict.fromkeys((MANIFEST, FILTERED_REPORT), "")
    assert tree(idle) | others == tree(plain) | others
    assert not (plain / FILTERED_REPORT).exists()
    assert Manifest.read(plain).corpus.filtered is None
    assert Manifest.read(idle).corpus.filtered == {"min_words": 0}
    assert report(idle) == []


def test_shards_of_filtered_documents_are_those_of_the_text(made: Path, tmp_path: Path) -> None:
    out = make(tmp_path / "out", "--from", made, *SHORT[:4], *SHORT[6:])
    ours, theirs = Manifest.read(out), Manifest.read(made)
    assert (ours.fingerprint, ours.corpus.filtered) == (theirs.fingerprint, theirs.corpus.filtered)
    assert not (out / FILTERED_REPORT).exists()
    run_main(verify.main, out)


def test_text_beside_filtered_documents_may_be_filtered_otherwise(place: Path, tmp_path: Path) -> None:
    first = make(
        tmp_path / "first", "--docs", place / "one", "--documents-only", *filters_of(place, "min_words", "max_words")
    )
    assert len(report(first)) == 40
    beside = ["--from", first, "--docs", place / "two", *filters_of(place, "min_words")]
    out = make(tmp_path / "out", *beside, *SHORT[:4])
    filtered = {"min_words": 2 * BAD, "max_words": BAD}
    assert Manifest.read(out).corpus.filtered == filtered
    assert {row["source"] for row in report(out)} == {"two"}
    again = make(tmp_path / "again", "--from", out, *SHORT[:4])
    assert Manifest.read(again).corpus.filtered == filtered


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_thresholds_that_leave_nothing_are_named(check: list[str], wiki: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "tiny.jsonl").write_text('{"text": "It is tiny."}\n' * 3)
    said = run(wiki, out, "--min-words", "5000", "--max-words", "9000", *check, code=2)
    assert "the filters leave no document:\n  --min-words 5000 left out 40\ngive other thresholds" in said
    said = run(wiki, out, "--docs", tmp_path / "tiny.jsonl", "--min-words", "4", *check)
    assert check or "the filters leave no document of tiny" in said


def test_one_language_is_left_where_that_is_asked_for(wiki: Path, tmp_path: Path) -> None:
    german = "Der Fluss entspringt in den Hügeln über der Stadt und fließt durch drei Seen, bevor er das Meer erreicht."
    docs = write_rows(tmp_path / "de.jsonl", [f"{german} {n}" for n in range(40)])
    run(wiki, tmp_path / "out", "--docs", docs, "--only-language", "en", "--min-words", "9")
    corpus = Manifest.read(tmp_path / "out").corpus
    assert "de" not in corpus.documents_by_source
    assert (corpus.filtered or {})["only_language"] >= 40
    assert "de" in {row["figure"] for row in report(tmp_path / "out")}


NUM_ORIGINALS = 120


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes texts, a near copy of each third, in which the last word is another, and a true copy of each tenth."""
    draw = random.Random(1)
    originals = [draw_text(draw, 12) for _ in range(NUM_ORIGINALS)]
    near = [f"{text[:-1]} indeed." for text in originals[::3]]
    return write_rows(tmp_path_factory.mktemp("docs") / "x.jsonl", [*originals, *near, *originals[::10]])


@pytest.fixture(scope="module")
def expected(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes shards without near copies, undisturbed and with one worker."""
    return make(tmp_path_factory.mktemp("expected") / "out", "--docs", docs, *SETTINGS, "--near-copies", "0.8")


def ids(folder: Path) -> list[int]:
    return [int(row["id"]) for row in map_batches(folder / "documents.arrow").read_all().to_pylist()]


def test_near_copies_are_left_out_counted_and_shown(docs: Path, expected: Path, tmp_path: Path) -> None:
    assert ids(expected) == [*range(NUM_ORIGINALS)]
    corpus = Manifest.read(expected).corpus
    assert (corpus.documents, corpus.near_copies, corpus.copies) == (NUM_ORIGINALS, 52, None)
    with (expected / NEAR_REPORT).open(newline="") as file:
        assert all(int(row["earlier id"]) < NUM_ORIGINALS <= int(row["id"]) for row in csv.DictReader(file))
    assert NEAR_REPORT in {record.path for record in Manifest.read(expected).files()}
    run_main(verify.main, expected)
    said = " ".join(run(docs, tmp_path / "both", "--near-copies", "0.8", "--drop-copies").split())
    assert "copies 12 left out, as an earlier document has their text" in said
    assert f"near copies 40 left out: 80% in common with an earlier one; see {NEAR_REPORT}" in said
    assert ids(tmp_path / "both") == ids(expected)


def test_documents_that_were_kept_lose_the_same(docs: Path, expected: Path, tmp_path: Path) -> None:
    run(docs, tmp_path / "documents", "--documents-only")
    tell(
        tmp_path / "out",
        "--from",
        tmp_path / "documents",
        *SETTINGS[:5],
        *SETTINGS[7:],
        "--near-copies",
        "0.8",
        "--workers",
        "2",
    )
    assert Manifest.read(tmp_path / "out").fingerprint == Manifest.read(expected).fingerprint


@pytest.mark.usefixtures("expected")  # by which all is compiled, so that what is interrupted is the run itself
def test_near_copies_are_looked_for_anew_where_the_text_changed(docs: Path, tmp_path: Path) -> None:
    more = tmp_path / "docs"
    more.mkdir()
    lines = docs.read_text().splitlines(keepends=True)
    (more / "1.jsonl").write_text("".join(lines[:NUM_ORIGINALS]))
    out = tmp_path / "out"
    with interrupted_at("examples"):
        run(more, out, "--near-copies", "0.8", code=130)
    assert WorkFolder(out).is_finished(FOUND)
    (more / "2.jsonl").write_text("".join(lines[NUM_ORIGINALS:]))
    run(more, out, "--near-copies", "0.8")
    assert Manifest.read(out).corpus.near_copies == 52
    run(more, tmp_path / "fresh", "--near-copies", "0.8")
    assert tree(out) == tree(tmp_path / "fresh")
