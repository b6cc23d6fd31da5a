"""The page of a folder shows what an independent count of the text finds, escaped, and the same every time."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import sentence
from support.commands import run_main
from support.damage import flip
from support.pages import ShownPage
from tokenizers import Tokenizer

from data_prep import shard, show, verify
from data_prep.arrow_files import read_shard
from data_prep.shards import MANIFEST, REPORT, Manifest

EVIL = "<script>alert('x')</script> \"quoted\" & more"
LONG = "x" * 400
"""The end of a title that is cut, that of the first near copy."""
SETTINGS = ["--lengths", "32", "64", "--duplicates", "1", "--vocab-size", "200", "--workers", "1"]
SETTINGS += ["--validation", "0.02"]
CHOICE = ["--drop-copies", "--near-copies", "0.8", "--max-share", "numbers=0.1", "--weight", "pages=2"]
Cut = dict[str, list[list[str]]]
"""The pieces of the documents of sources."""
SECTIONS = {"sources", "lengths", "left-out", "vocabulary", "masks"}


def texts() -> dict[str, list[str]]:
    """Three sources: pages, some of which are copies and near copies of others, tables of numbers, and one page."""
    draw = random.Random(3)
    pages = [" ".join(sentence(draw) for _ in range(draw.randint(3, 12))) for _ in range(200)]
    long = [[sentence(draw) for _ in range(30)] for _ in range(8)]
    near = [[*sentences[:-1], sentence(draw)] for sentences in long]
    pages += [" ".join(sentences) for sentences in (*long, *near)] + pages[:7]
    numbers = [" ".join(str(draw.randint(0, 10**6)) for _ in range(80)) + "." for _ in range(90)]
    return {"pages": pages, "numbers": numbers, "more <b>": [f"{EVIL} {sentence(draw)}" for _ in range(40)]}


def write(folder: Path) -> list[str]:
    """Writes the texts into a folder each, by whose names the sources are called; returns the arguments for them."""
    for source, documents in texts().items():
        rows = [
            {"text": text, "id": str(at), "title": f"{EVIL} {source} {at}{LONG * (at == 208)}"}
            for at, text in enumerate(documents)
        ]
        (folder / source).mkdir(parents=True)
        (folder / source / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--docs", *(str(folder / source) for source in texts())]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run_main(shard.main, *write(folder / "text"), "--out", folder / "out", *SETTINGS, *CHOICE)
    return folder / "out"


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "data"))


def page_of(folder: Path, *more: str) -> ShownPage:
    run_main(show.main, folder, "--report", *more)
    return ShownPage((folder / REPORT).read_text())


@pytest.fixture(scope="module")
def page(made: Path, tmp_path_factory: pytest.TempPathFactory) -> ShownPage:
    return page_of(Path(shutil.copytree(made, tmp_path_factory.mktemp("shown") / "data")))


@pytest.fixture(scope="module")
def cut(made: Path) -> Cut:
    """Documents as transformers cuts them."""
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    return {
        source: [tokenizer.encode(text, add_special_tokens=False).tokens for text in documents]
        for source, documents in texts().items()
    }


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_sources_have_the_documents_and_pieces_of_the_text(page: ShownPage, cut: Cut, made: Path) -> None:
    pieces = {source: sum(map(len, texts)) for source, texts in cut.items()}
    shown = page.column("Table of sources", "pieces")
    assert {source: number(shown[source]) for source in cut} == pieces
    assert number(shown["all"]) == sum(pieces.values())
    read = page.column("Table of sources", "documents read")
    assert {source: number(read[source]) for source in cut} == {source: len(some) for source, some in texts().items()}
    left = page.column("Table of sources", "documents left")
    table = Counter(row["source"] for row in documents_of(made))
    assert number(left["pages"]) == 200 + 8
    assert number(left["numbers"]) == table["numbers"] < 90
    shares = page.column("Table of sources", "share")
    for source in cut:
        share = 100 * pieces[source] / sum(pieces.values())
        assert float(shares[source].rstrip("%")) == pytest.approx(share, abs=0.5)
    assert page.column("Table of sources", "asked for")["pages"] == "2 times"
    assert page.column("Table of sources", "asked for")["numbers"] == "at most 10%"


def documents_of(folder: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = pa.ipc.open_file(str(folder / "documents.arrow")).read_all().to_pylist()
    return rows


def test_lengths_of_documents_are_those_of_their_text(page: ShownPage, cut: Cut) -> None:
    sizes = sorted(len(text) for texts in cut.values() for text in texts)
    assert f"The shortest has {sizes[0]:,} pieces and the longest {sizes[-1]:,};" in page.text
    middle = next(size for size in sizes if sum(other <= size for other in sizes) >= len(sizes) / 2)
    assert f"half {middle:,}," in page.text
    bars = re.findall(r"([\d,]+)(?: to ([\d,]+))? pieces: ([\d,]+) documents", page.text)
    assert sum(number(count) for *_, count in bars) == len(sizes)
    for low, high, count in bars:
        assert number(count) == sum(number(low) <= size <= number(high or low) for size in sizes)


def test_lengths_of_examples_are_those_of_the_shards(page: ShownPage, made: Path) -> None:
    for length in (32, 64):
        rows = read_shard(made / f"length-{length}/duplicate-0/shard-00000.arrow").to_pylist()
        name, pieces = f"length-{length}/duplicate-0", sum(len(row["pieces"]) for row in rows)
        assert number(page.column("Table of sets of examples", "examples")[name]) == len(rows)
        assert number(page.column("Table of sets of examples", "pieces")[name]) == pieces
        assert page.column("Table of sets of examples", "full")[name] == f"{100 * pieces / len(rows) / length:.0f}%"
        full = sum(len(row["pieces"]) > length - length // 32 for row in rows)
        assert f"{full:,} examples" in page.text


def test_what_was_left_out_adds_up(page: ShownPage, made: Path) -> None:
    shown = {name: number(count) for name, count in page.column("Table of what was left out", "number").items()}
    before, after = sum(map(len, texts().values())), Manifest.read(made).corpus.documents
    assert shown == {**shown, "copies": 7, "near copies": 8, "unreadable": 0, "without text": 0}
    assert before - shown["copies"] - shown["near copies"] - shown["over share"] == after
    assert f"Of {before:,} documents with text, {after:,} are left." in page.text
    rows = page.tables["Examples: near copies"][1:]
    assert len(rows) == 8
    assert {row[1] for row in rows} == {"pages"}
    assert rows[0][3] == f"{EVIL} pages 208{LONG}"[:300] + "…"


def test_the_masks_of_ten_examples_are_marked(page: ShownPage, made: Path) -> None:
    rows = read_shard(made / "length-32/duplicate-0/shard-00000.arrow").slice(0, 10).to_pylist()
    mask = (made / "vocab.txt").read_text().split("\n").index("[MASK]")
    kinds = Counter({"masked": 1, "replaced": 1, "kept": 1})  # those of the legend
    for row in rows:
        for label in row["masked"]:
            now = row["pieces"][label["position"]]
            kinds["masked" if now == mask else "kept" if now == label["piece"] else "replaced"] += 1
    assert (page.elements["article"], page.marks) == (10, kinds)


def test_text_is_escaped_and_every_section_is_named_in_the_head(page: ShownPage, made: Path) -> None:
    assert page.elements["script"] == page.elements["b"] == page.elements["img"] == page.elements["link"] == 0
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "action")]
    assert {value for name, value in page.attributes if name == "href"} == {f"#{name}" for name in SECTIONS}
    assert page.anchors >= SECTIONS
    assert any(EVIL in cell for row in page.tables["Examples: near copies"] for cell in row)
    assert "more <b>" in page.column("Table of sources", "files")
    assert Manifest.read(made).fingerprint in page.text
    used = ("--drop-copies", "--near-copies 0.8", "--max-share numbers=0.1", "--weight pages=2", "--vocab-size 200")
    assert all(setting in page.text for setting in (*used, "--lengths 32 64", "--duplicates 1", "--validation 0.02"))


def test_the_page_is_the_same_wherever_and_whenever_it_is_made(data: Path, made: Path, tmp_path: Path) -> None:
    """verify.py knows it, and the fingerprint does not."""
    before = (data / MANIFEST).read_bytes()
    page_of(data)
    first = (data / REPORT).read_bytes()
    page_of(data)
    assert (data / REPORT).read_bytes() == first
    page_of(made)
    assert (made / REPORT).read_bytes() == first
    assert str(tmp_path).encode() not in first
    assert str(made.parent).encode() not in first
    assert not re.search(rb"\d\d:\d\d|20\d\d-\d\d-\d\d", first)
    said = run_main(verify.main, data)
    assert "not in the manifest" not in said
    assert said.strip().endswith("all is right")
    assert (data / MANIFEST).read_bytes() == before


def test_a_folder_of_documents_alone_has_a_page_without_examples(tmp_path: Path) -> None:
    arguments = [*write(tmp_path / "text"), "--vocab-size", "200", "--documents-only", "--workers", "1"]
    run_main(shard.main, *arguments, "--out", tmp_path / "only")
    page = page_of(tmp_path / "only")
    assert page.anchors >= SECTIONS
    assert (page.text.count("There are no examples"), page.elements["article"]) == (2, 0)
    assert number(page.column("Table of sources", "documents read")["pages"]) == len(texts()["pages"])
    shards = tmp_path / "shards"
    run_main(shard.main, "--from", tmp_path / "only", "--out", shards, *SETTINGS[:3], "--workers", "1")
    page = page_of(shards)
    assert number(page.column("Table of sources", "documents read")["pages"]) == len(texts()["pages"])
    shutil.rmtree(tmp_path / "only")
    page = page_of(shards)
    assert "the folder that has them is gone" in page.text
    assert "The lengths of documents are not known" in page.text


def test_of_many_files_a_sample_is_read_and_said_to_be_one(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.inspection.page.writing.MOST_FILES", 2)
    page = page_of(data)
    assert "a sample: those in 2 of 3 files from all over the corpus" in page.text
    assert number(page.column("Table of sources", "documents read")["all"]) == sum(map(len, texts().values()))


def test_a_page_is_not_made_of_damage(data: Path) -> None:
    (data / REPORT).unlink(missing_ok=True)
    (data / REPORT).mkdir()
    assert f"{data / REPORT}" in run_main(show.main, data, "--report", code=2)
    flip(data / "vocab.txt")
    assert f"{data / 'vocab.txt'}" in run_main(show.main, data, "--report", code=2)


@pytest.mark.slow
def test_a_page_of_a_damaged_folder_is_made_or_refused_in_a_line(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw, codes = random.Random(7), Counter[int]()
    files = [path for path in sorted(data.rglob("*")) if path.suffix in (".arrow", ".csv", ".txt", ".json")]
    for _ in range(60):
        path = draw.choice(files)
        sound = path.read_bytes()
        damaged = bytearray(sound)
        for _ in range(draw.choice((1, 20))):
            damaged[draw.randrange(len(sound))] = draw.randrange(256)
        path.write_bytes(damaged)
        codes[show.main([str(data), "--report"])] += 1
        path.write_bytes(sound)
    assert codes.keys() == {0, 2}
    assert capfd.readouterr().err.count("error: ") == codes[2]
