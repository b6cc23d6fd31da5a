"""shard.py leaves documents out that fail filters, before the vocabulary is trained; it counts them and shows some."""

from __future__ import annotations

import csv
import functools
import json
import random
from pathlib import Path

import pytest
from conftest import sentence
from support.sharding import interrupted_at, tree

from data_prep import shard, verify
from data_prep.arrow_files import map_batches
from data_prep.seals import FILTERED_REPORT
from data_prep.shards import MANIFEST, Manifest

ASKED = ["--lengths", "32", "--duplicates", "1", "--vocab-size", "400", "--shard-size", "64KB"]
GOOD, BAD = 150, 30  # documents of a source: good ones, and those of each bad kind
SOURCES = ("one", "two")


@functools.cache
def texts_of(source: str) -> dict[str, list[str]]:
    """Makes good documents, and bad ones by the filter that they fail first."""
    draw = random.Random(source)

    def text(lines: int) -> list[str]:
        return [" ".join(sentence(draw) for _ in range(3)) for _ in range(lines)]

    return {
        "good": ["\n".join([*text(4), f"Goodly {n}."]) for n in range(GOOD)],
        "min_words": [f"Tiny {source} {n}." for n in range(BAD)],
        "max_words": ["\n".join([*text(40), f"Long {n}."]) for n in range(BAD)],
        "min_letters": ["\n".join([*text(4), f"{n} " * 900]) for n in range(BAD)],
        "max_repeated_lines": ["\n".join([*text(2) * 3, f"Again {n}."]) for n in range(BAD)],
        "without_words": ["\n".join([*text(4), f"A Zwiebelfisch swims {n}."]) for n in range(BAD)],
    }


FILTERS = {
    "min_words": "20",
    "max_words": "1200",
    "min_letters": "0.5",
    "max_repeated_lines": "0.3",
    "without_words": "WORDS",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes two sources, in which good and bad documents are mixed, and a list of words."""
    folder = tmp_path_factory.mktemp("texts")
    for source in SOURCES:
        rows = [{"id": f"{kind}-{n}", "title": kind, "text": text} for kind, own in texts_of(source).items()
                for n, text in enumerate(own)]  # fmt: skip
        random.Random(1).shuffle(rows)
        (folder / source).mkdir()
        (folder / source / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.txt").write_text("zwiebelfisch\nno such phrase\n")
    return folder


def filters_of(place: Path, *names: str) -> list[str]:
    """Spells filters as flags: all of them, or those that are named."""
    values = {name: value.replace("WORDS", str(place / "words.txt")) for name, value in FILTERS.items()}
    return [word for name in names or values for word in (f"--{name.replace('_', '-')}", values[name])]


def make(place: Path, out: Path, *more: str, code: int = 0) -> Path:
    """Runs shard.py on both sources, on one worker if nothing else is said."""
    docs = [str(place / source) for source in SOURCES]
    assert shard.main(["--docs", *docs, "--out", str(out), *ASKED, "--workers", "1", *more]) == code
    return out


@pytest.fixture(scope="module")
def made(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(place, tmp_path_factory.mktemp("made") / "out", *filters_of(place))


def report(folder: Path) -> list[dict[str, str]]:
    with (folder / FILTERED_REPORT).open(newline="") as file:
        return list(csv.DictReader(file))


def test_documents_that_fail_are_left_out_and_counted_by_the_first_filter(made: Path, tmp_path: Path) -> None:
    rows = map_batches(made / "documents.arrow").read_all().to_pylist()
    assert [row["title"] for row in rows] == ["good"] * GOOD * len(SOURCES)
    corpus = Manifest.read(made).corpus
    assert corpus.filtered == dict.fromkeys(FILTERS, BAD * len(SOURCES))
    assert corpus.documents == GOOD * len(SOURCES)
    vocabulary = (made / "vocab.txt").read_text().split()
    assert "zwiebelfisch" not in vocabulary
    assert "goodly" in vocabulary
    assert verify.main([str(made)]) == 0


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
    assert figures["--min-words"] == "3"
    assert figures["--without-words"] == "zwiebelfisch"
    assert 0.3 < float(figures["--max-repeated-lines"]) < 0.6


def test_the_end_of_a_run_tells_what_was_left_out(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(place, tmp_path / "out", *filters_of(place, "min_words"))
    said = " ".join(capfd.readouterr().out.split())
    assert f"--min-words 60 left out while the text was read; see {FILTERED_REPORT}" in said
    assert "--max-words" not in said


def test_two_workers_write_the_same_bytes(place: Path, made: Path, tmp_path: Path) -> None:
    assert tree(make(place, tmp_path / "out", *filters_of(place), "--workers", "2")) == tree(made)


def test_a_run_that_is_interrupted_goes_on_with_the_same_filters_alone(
    place: Path, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with interrupted_at("tokens"):
        make(place, out, *filters_of(place), code=130)
    other = place / "other-words.txt"
    other.write_text("zwiebelfisch\n")
    changed = ["--min-words", "21", "--without-words", str(other)]
    make(place, out, *filters_of(place), *changed, code=2)
    said = capfd.readouterr().err
    assert "--min-words was 20, now 21" in said
    assert "--without-words was 2 words (" in said
    make(place, out, code=2)
    assert "--min-letters was 0.5, now not given" in capfd.readouterr().err
    moved = tmp_path / "words.txt"
    moved.write_text((place / "words.txt").read_text())
    make(place, out, *filters_of(place), "--without-words", str(moved))
    assert tree(out) == tree(made)


def test_a_file_that_is_added_is_filtered_as_if_it_had_been_there(place: Path, tmp_path: Path) -> None:
    docs, out = tmp_path / "docs", tmp_path / "out"
    docs.mkdir()
    (docs / "1.jsonl").write_text((place / "one/rows.jsonl").read_text())
    words = ["--docs", str(docs), *ASKED, "--workers", "1", *filters_of(place)]
    with interrupted_at("tokens"):
        assert shard.main([*words, "--out", str(out)]) == 130
    (docs / "2.jsonl").write_text((place / "two/rows.jsonl").read_text())
    assert shard.main([*words, "--out", str(out)]) == 0
    assert shard.main([*words, "--out", str(tmp_path / "fresh")]) == 0
    assert tree(out) == tree(tmp_path / "fresh")


def test_filters_that_leave_nothing_out_change_no_shard(place: Path, tmp_path: Path) -> None:
    plain = make(place, tmp_path / "plain")
    idle = make(place, tmp_path / "idle", "--min-words", "1")
    others = {MANIFEST, FILTERED_REPORT}
    assert {path: own for path, own in tree(idle).items() if path not in others} == {
        path: own for path, own in tree(plain).items() if path not in others
    }
    assert not (plain / FILTERED_REPORT).exists()
    assert Manifest.read(plain).corpus.filtered is None
    assert Manifest.read(idle).corpus.filtered == {"min_words": 0}
    assert report(idle) == []


def test_shards_of_filtered_documents_are_those_of_the_text(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [*ASKED[: ASKED.index("--vocab-size")], "--shard-size", "64KB", "--workers", "1"]
    assert shard.main(["--from", str(made), "--out", str(out), *options]) == 0
    ours, theirs = Manifest.read(out), Manifest.read(made)
    assert (ours.fingerprint, ours.corpus.filtered) == (theirs.fingerprint, theirs.corpus.filtered)
    assert not (out / FILTERED_REPORT).exists()
    assert verify.main([str(out)]) == 0


def test_text_beside_filtered_documents_may_be_filtered_otherwise(place: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    words = ["--docs", str(place / "one"), "--out", str(first), *ASKED, "--documents-only", "--workers", "1"]
    assert shard.main([*words, *filters_of(place, "min_words", "max_words")]) == 0
    assert len(report(first)) == 40
    beside = ["--from", str(first), "--docs", str(place / "two"), "--lengths", "32", "--duplicates", "1"]
    out = tmp_path / "out"
    assert shard.main([*beside, "--workers", "1", "--out", str(out), *filters_of(place, "min_words")]) == 0
    assert Manifest.read(out).corpus.filtered == {"min_words": 2 * BAD, "max_words": BAD}
    assert {row["source"] for row in report(out)} == {"two"}
    assert shard.main(["--from", str(out), "--lengths", "32", "--workers", "1", "--out", str(tmp_path / "again")]) == 0
    assert Manifest.read(tmp_path / "again").corpus.filtered == {"min_words": 2 * BAD, "max_words": BAD}


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_thresholds_that_leave_nothing_are_named_and_cost_no_other_folder(
    check: list[str], place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    make(place, out, "--min-words", "5000", "--max-words", "9000", *check, code=2)
    said = capfd.readouterr().err
    assert "the filters leave no document:\n  --min-words 5000 left out 600, such as " in said
    assert "give other thresholds" in said
    make(place, out, "--min-words", "4", *check)


def test_a_source_that_is_left_out_as_a_whole_is_named(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.jsonl").write_text('{"text": "It is tiny."}\n' * 3)
    make(place, tmp_path / "out", "--docs", str(tmp_path / "tiny.jsonl"), "--min-words", "4")
    assert "the filters leave no document of tiny" in capfd.readouterr().out


def test_filters_may_stand_in_a_file(place: Path, made: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "min-words = 20\nmax-words = 1200\nmin-letters = 0.5\nmax-repeated-lines = 0.3\n"
        f'without-words = "{place / "words.txt"}"\n'
    )
    assert tree(make(place, tmp_path / "out", "--config", str(config))) == tree(made)


def test_one_language_is_left_where_that_is_asked_for(place: Path, tmp_path: Path) -> None:
    german = "Der Fluss entspringt in den Hügeln über der Stadt und fließt durch drei Seen, bevor er das Meer erreicht."
    (tmp_path / "de.jsonl").write_text("".join(json.dumps({"text": f"{german} {n}"}) + "\n" for n in range(40)))
    make(place, tmp_path / "out", "--docs", str(tmp_path / "de.jsonl"), "--only-language", "en", "--min-words", "9")
    corpus = Manifest.read(tmp_path / "out").corpus
    assert "de" not in corpus.documents_by_source
    assert (corpus.filtered or {})["only_language"] >= 40
    assert "de" in {row["figure"] for row in report(tmp_path / "out")}
