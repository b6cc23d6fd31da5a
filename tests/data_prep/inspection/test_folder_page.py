"""The page of a folder shows what an independent count of the text finds, escaped, and the same every time."""

import csv
import json
import random
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import sentence
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_main
from support.damage import flip
from support.shards import SHORT, make, write_rows
from tokenizers import Tokenizer

from data_prep import show, verify
from data_prep.arrow_files import map_batches, read_shard
from data_prep.common.files import FileRecord
from data_prep.inspection.figures import list_reasons
from data_prep.inspection.lookup import ShownExample, format_example, mark_pieces
from data_prep.inspection.page import writing
from data_prep.inspection.page.writing import MOST_BARS, Bar, make_doubling_bars, make_even_bars
from data_prep.settings import Settings
from data_prep.shards import MANIFEST, REPORT, CorpusFigures, Manifest, RecordedSettings
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece


class ShownPage(HTMLParser):
    """What a page shows."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.marks: Counter[str] = Counter()
        self.tables: dict[str, list[list[str]]] = {}
        """The rows of the tables, by the names of the boxes around them."""
        self._words: list[str] = []
        self._box = ""
        self._open: list[str] = []
        self.feed(content)

    @property
    def text(self) -> str:
        """All that can be read, with single spaces."""
        return " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        values = {name: value or "" for name, value in attrs}
        self.attributes += values.items()
        self.anchors.add(values.get("id", ""))
        self._open.append(tag)
        if tag == "mark":
            self.marks[values["class"]] += 1
        if tag == "div" and values.get("role") == "region":
            self._box = values["aria-label"]
            self.tables[self._box] = []
        if tag == "tr":
            self.tables[self._box].append([])
        if tag in ("td", "th"):
            self.tables[self._box][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & {*self._open}:
            return
        self._words.append(data)
        if {"td", "th"} & {*self._open}:
            self.tables[self._box][-1][-1] += data

    def column(self, table: str, name: str) -> dict[str, str]:
        """A column of a table, by the first column."""
        head, *rows = self.tables[table]
        return {row[0]: row[head.index(name)] for row in rows}


EVIL = "<script>alert('x')</script> \"quoted\" & more"
LONG = "x" * 400
"""The end of a title that is cut, that of the first near copy."""
SETTINGS = ["--lengths", "32", "64", "--duplicates", "1", "--vocab-size", "200", "--validation", "0.02"]
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
    return make(folder / "out", *write(folder / "text"), *SETTINGS, *CHOICE)


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
    table = Counter(map_batches(made / "documents.arrow").read_all()["source"].to_pylist())
    assert number(left["pages"]) == 200 + 8
    assert number(left["numbers"]) == table["numbers"] < 90
    shares = page.column("Table of sources", "share")
    for source in cut:
        share = 100 * pieces[source] / sum(pieces.values())
        assert float(shares[source].rstrip("%")) == pytest.approx(share, abs=0.5)
    asked = page.column("Table of sources", "asked for")
    assert (asked["pages"], asked["numbers"]) == ("2 times", "at most 10%")


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
    assert "→[MASK]" not in page.text


def test_text_from_right_to_left_is_shown_so(tmp_path: Path) -> None:
    """A segment has the direction of its first plain word: whatever else stands in it has a direction of its own."""
    text = "ذهب الولد إلى المدرسة في الصباح. ثم عاد إلى البيت مع أخته الصغيرة. "
    docs = write_rows(tmp_path / "ar.jsonl", [f"{text}{number} {text}" for number in range(60)])
    made = make(tmp_path / "out", "--docs", docs, *SHORT)
    content = writing.make_page(made)
    segments = re.findall(r'<p class="segment" dir="auto">(.*?)</p>', content)
    assert segments
    for segment in segments:
        plain = re.sub(r"<(strong|span|mark)\b[^>]* dir=[^>]*>.*?</\1>", "", segment)
        assert not re.search("[A-Za-z]", plain), plain
    replaced = re.findall('<mark class="replaced" dir="ltr" title="[^"]*">(.*?)</mark>', content)
    assert replaced
    assert all(re.fullmatch("<bdi>[^<]+</bdi>→<bdi>[^<]+</bdi>", one) for one in replaced)


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
    only = make(tmp_path / "only", *write(tmp_path / "text"), "--vocab-size", "200", "--documents-only")
    page = page_of(only)
    assert page.anchors >= SECTIONS
    assert (page.text.count("There are no examples"), page.elements["article"]) == (2, 0)
    assert number(page.column("Table of sources", "documents read")["pages"]) == len(texts()["pages"])
    shards = make(tmp_path / "shards", "--from", only, *SETTINGS[:2], *SETTINGS[3:5])
    page = page_of(shards)
    assert number(page.column("Table of sources", "documents read")["pages"]) == len(texts()["pages"])
    shutil.rmtree(only)
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


CHARTS: Any = writing.TEMPLATES.get_template("charts.html").module


def heights(bars: list[Bar]) -> list[float]:
    """The heights of the bars in percent, as a browser draws them."""
    drawing = str(CHARTS.drawing(bars, "documents"))
    return [float(height) for height in re.findall(r'class="bar" .* height="([\d.]+)"', drawing)]


def ticks(bars: list[Bar]) -> list[tuple[str, str]]:
    """The numbers below a histogram, each with its place; the last is at the right end."""
    page = str(CHARTS.histogram(bars, "documents", ""))
    return re.findall(r'<span style="(.*?)">(.*?)</span>', page)


@given(st.lists(st.integers(1, 10**7), min_size=1))
def test_every_document_is_in_the_bar_of_its_length(sizes: list[int]) -> None:
    bars = make_doubling_bars(np.array(sizes))
    assert sum(bar.number for bar in bars) == len(sizes)
    for bar in bars:
        assert bar.number == sum(bar.first <= size <= bar.last for size in sizes)
    assert max(heights(bars)) == 100
    assert len(ticks(bars)) <= 6


@given(st.lists(st.integers(0, 10**9), min_size=9, max_size=513))
def test_every_example_is_in_the_bar_of_its_length(counts: list[int]) -> None:
    bars = make_even_bars([0, *counts[1:]])
    assert sum(bar.number for bar in bars) == sum(counts[1:])
    assert len(bars) <= MOST_BARS
    *places, end = ticks(bars)
    assert end == ("right:0", f"{len(counts) - 1:,}")
    assert max(float(place.removeprefix("left:").rstrip("%")) for place, _ in places) <= 75


def test_reasons_are_those_of_the_settings_in_the_order_of_their_work(made: Path) -> None:
    found: dict[str, Any] = {
        "filtered": {"only_language": 6, "min_words": 5},
        "copies": 0,
        "near_copies": 2,
        "over_share": 3,
    }
    corpora = (CorpusFigures(documents=10, validation_documents=1, **figures) for figures in ({}, found))
    none, told = (Manifest.read(made).model_copy(update={"corpus": corpus}) for corpus in corpora)
    expected = [("min_words", 5), ("only_language", 6), ("copies", 0), ("near copies", 2), ("over share", 3)]
    assert not list(list_reasons(none))
    assert [(reason.name, reason.count) for reason in list_reasons(told)] == expected


def test_every_table_of_values_shows_its_first_rows(made: Path, tmp_path: Path) -> None:
    rows = [["why", "text"], *([str(number), "x" * 10_000 if number else '"a",\n<b>'] for number in range(50))]
    with (tmp_path / "too-short.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    records = {"tables": [FileRecord.from_file(tmp_path, "too-short.csv")]}
    tables = writing.read_tables(tmp_path, Manifest.read(made).model_copy(update=records))
    assert tables == {"too-short.csv": rows[: writing.MOST_ROWS + 1]}


def test_settings_are_spelled_as_flags(made: Path) -> None:
    settings = Settings(cased=True, weight=(("a=2",), ("b=0.5",)), lengths=(64,), validation=0.0)
    later: dict[str, Any] = {"sieve": None, "filters": {"length": 3}}  # settings of a later version
    recorded = {"settings": RecordedSettings(**settings.record_values(), **later)}
    told = writing.spell_settings(Manifest.read(made).model_copy(update=recorded))
    assert {"--cased", "--weight a=2 b=0.5", "--lengths 64", "--validation 0", "--filters length=3"} <= {*told}


def test_marks_read_alike_in_a_terminal_and_on_a_page() -> None:
    vocabulary = WordPiece((*SPECIAL, "play", "##ing", "<b>", "##s"), cased=False)
    example = ShownExample([2, 5, 4, 7, 3, 5, 8, 3], {2: 6, 3: 7, 5: 7}, boundary=5, random_next=False, document=0)
    pieces = list(mark_pieces(example, vocabulary))
    assert [piece.style for piece in pieces] == ["special", "", "masked", "kept", "special", "replaced", "", "special"]
    assert [piece.was for piece in pieces if piece.style == "masked"] == ["##ing"]
    lines = [line.plain for line in format_example(example, vocabulary)]
    assert lines[:2] == ["A  [CLS] play##ing→[MASK] =<b>= [SEP]", "B  <b>→plays [SEP]"]
