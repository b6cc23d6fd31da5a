"""The parts of a folder's page: counts that add up whatever they are of, and text of any kind in its tables."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.common.files import FileRecord
from data_prep.inspection.figures import list_reasons
from data_prep.inspection.lookup import ShownExample, format_example, mark_pieces
from data_prep.inspection.page import writing
from data_prep.inspection.page.writing import MOST_BARS, Bar, make_doubling_bars, make_even_bars
from data_prep.settings import Settings
from data_prep.shards import CorpusFigures, Manifest, RecordedSettings, VocabularyFigures
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece

CHARTS: Any = writing.TEMPLATES.get_template("charts.html").module


def manifest(**changes: Any) -> Manifest:
    """A manifest that says little else than what a test needs."""
    said: dict[str, Any] = {
        "settings": RecordedSettings(**Settings().record_values()),
        "sources": [],
        "given_vocabulary": None,
        "fingerprint": "",
        "corpus": CorpusFigures(documents=10, validation_documents=0),
        "vocabulary": VocabularyFigures(size=100, sha256="", cased=False),
        "files": [],
        "sets": [],
        "bytes": 0,
    }
    return Manifest(**{**said, **changes})


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


def test_reasons_are_those_of_the_settings_and_filters_are_ready_to_be_told() -> None:
    assert not list(list_reasons(manifest()))
    corpus = CorpusFigures(documents=10, validation_documents=1, copies=0, near_copies=2, over_share=3)
    filtered = corpus.model_copy(update={"filtered": {"only_language": 6, "min_words": 5}})
    told = manifest(corpus=filtered)
    counts = {reason.name: reason.count for reason in list_reasons(told)}
    expected = {"min_words": 5, "only_language": 6, "copies": 0, "near copies": 2, "over share": 3}
    assert list(counts.items()) == list(expected.items())


def test_every_table_of_values_shows_its_first_rows(tmp_path: Path) -> None:
    rows = [["why", "text"], *([str(number), "x" * 10_000 if number else '"a",\n<b>'] for number in range(50))]
    with (tmp_path / "too-short.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    tables = writing.read_tables(tmp_path, manifest(files=[FileRecord.from_file(tmp_path, "too-short.csv")]))
    assert tables == {"too-short.csv": rows[: writing.MOST_ROWS + 1]}


def test_settings_are_spelled_as_flags() -> None:
    settings = Settings(cased=True, weight=(("a=2",), ("b=0.5",)), lengths=(64,), validation=0.0)
    later: dict[str, Any] = {"sieve": None, "filters": {"length": 3}}  # settings of a later version
    told = writing.spell_settings(manifest(settings=RecordedSettings(**settings.record_values(), **later)))
    assert {"--cased", "--weight a=2 b=0.5", "--lengths 64", "--validation 0", "--filters length=3"} <= {*told}


def test_marks_read_alike_in_a_terminal_and_on_a_page() -> None:
    vocabulary = WordPiece((*SPECIAL, "play", "##ing", "<b>", "##s"), cased=False)
    example = ShownExample([2, 5, 4, 7, 3, 5, 8, 3], {2: 6, 3: 7, 5: 7}, boundary=5, random_next=False, document=0)
    pieces = list(mark_pieces(example, vocabulary))
    assert [piece.style for piece in pieces] == ["special", "", "masked", "kept", "special", "replaced", "", "special"]
    assert [piece.was for piece in pieces if piece.style == "masked"] == ["##ing"]
    lines = [line.plain for line in format_example(example, vocabulary)]
    assert lines[:2] == ["A  [CLS] play##ing→[MASK] =<b>= [SEP]", "B  <b>→plays [SEP]"]
