"""The page of all results needs nothing else, has no ratio of sides that ran apart, and refuses what it cannot read."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import ROOT

from benchmarks.measure import RESULTS
from benchmarks.report import PAGES, page, published, read_all, rewritten, run_section, sections
from benchmarks.svg import bars, curves, ticks
from benchmarks.tables import APART, blocks_of, cell, ratio
from data_prep.common.errors import UserError

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Follows the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.links += [str(found[name]) for name in ("href", "src", "data", "xlink:href", "action") if name in found]
        self.anchors.add(str(found.get("id")))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def results(benchmark: str = "throughput", **found: Any) -> dict[str, Any]:
    """A file of results."""
    environment = {"date": "2026-01-01", "hardware": "avx2-2-cores", "processor": "P", "instruction_sets": ["avx2"]}
    return {"format": 2, "benchmark": benchmark, "environment": environment, **found}


def contest(**more: Any) -> dict[str, Any]:
    """A contest whose sides took no turns, unless more is said."""
    side = {
        "sequences_per_second": {"median": 10.0, "lowest": 9.0, "highest": 11.0},
        "share_of_ceiling": {"median": 0.5},
    }
    side["real_pieces_per_second"] = {"median": 1000.0}
    return {"sequences": 8, "sides": {"cloze": side, "transformers": side}, **more}


def report(*options: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    command = [sys.executable, str(ROOT / "benchmarks/report.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_of_what_is_committed_needs_nothing_else(tmp_path: Path) -> None:
    done = report("--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "index.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert reader.links
    assert all(link.startswith("#") and link[1:] in reader.anchors for link in reader.links)
    assert "url(" not in text
    assert "@import" not in text
    for path in RESULTS.glob("*.json"):
        assert f'<h2 id="{path.stem}">' in text
        assert f"## {path.stem}\n" in (tmp_path / "report.md").read_text()


def test_the_tables_of_docs_are_those_of_the_results() -> None:
    """Where this fails: python benchmarks/report.py --docs."""
    found = read_all(RESULTS)
    for path in PAGES:
        text = path.read_text()
        assert "<!-- results of " in text
        assert rewritten(text, found) == text, f"{path.name} is stale: python benchmarks/report.py --docs"
    stale = PAGES[0].read_text().replace("| base at", "| huge at")
    assert rewritten(stale, found) == PAGES[0].read_text()


def test_a_ratio_is_printed_only_of_sides_in_turns() -> None:
    turns = contest(times_as_fast_as={"transformers": {"median": 3.0, "lowest": 2.5, "highest": 3.5}})
    assert ratio(turns, "transformers") == "3 (2.5 to 3.5)"
    assert ratio(contest(), "transformers") == APART
    del turns["sides"]["transformers"]
    assert ratio(turns, "transformers") == APART
    ours = {"cloze fp32": {"peer": 2.0}, "cloze bf16": {"peer": 3.0}}
    assert ratio({"sides": {"cloze fp32": {}, "peer": {}}, "times_as_fast": ours}, "peer") == "fp32 2"
    assert APART in page(list(sections({"a": results(contests={"base-128": contest()})}, None)))


def test_names_in_results_cannot_become_tags() -> None:
    found = {**results(contests={"<b>": contest()}), "<i>": {"<u>": {"<s>": 1}}}
    reader = Reader()
    reader.feed(page(list(sections({"<a>": found}, None))))
    assert not reader.tags & {"b", "i", "u", "s"}


def test_results_of_any_shape_become_tables() -> None:
    one = {"scaling": "weak", "processes": 1, "sequences_per_second": 5.0, "efficiency": {"median": 1.0}, "ideal": 1.0}
    two = {**one, "processes": 2, "sequences_per_second": 9.0, "efficiency": {"median": 0.9}}
    found = {"points": [one, two], "lists": [[1], [2]], "of": {"a": {"b": {"share": 0.25}}}}
    blocks = blocks_of(results("new", **found, one=12345, curve=list(range(9)), none=[]))
    chart, *_ = [block for block in blocks if block.svg]
    measured, ideal = ElementTree.fromstring(chart.svg).findall("polyline")
    assert "stroke-dasharray" in ideal.attrib
    [first, last], [first_ideal, last_ideal] = (each.attrib["points"].split() for each in (measured, ideal))
    assert first == first_ideal
    assert float(last.split(",")[1]) > float(last_ideal.split(",")[1])  # it lies below
    words = "\n".join(block.markdown() for block in blocks)
    assert "| one | 12,345 |" in words
    assert "| weak | 2 | 9 | 0.9 | 1 |" in words
    assert "25.0%" in words
    assert "9 values" in words


def test_published_rows_stand_beside_ours_without_a_ratio() -> None:
    row = {"model": "large", "length": 128, "gpu": "a100", "gpus": 8, "software": "S", "padded": True, "source": "P"}
    content = {"rows": [{**row, "sequences_per_second": 4591}], "hours": []}
    _, table, _ = published(content, {"mine": results(contests={"large-128": contest()})}).blocks
    ours, theirs = table.rows
    assert ours[:4] == ["large at 128", "avx2-2-cores", "Cloze", "10"]
    assert theirs == ["large at 128", "8 x a100", "S", "4,591", "P", "574", "yes"]


def test_the_loss_of_a_run_is_drawn(tmp_path: Path) -> None:
    lines = [{"kind": "step", "step": step, "loss": 10 / step} for step in range(1, 50)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn, newest = run_section(tmp_path).blocks
    [line] = ElementTree.fromstring(drawn.svg).findall("polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(heights) == 49
    assert heights == sorted(heights)  # a falling loss goes down the page
    assert newest.rows == [["step", "49", "0.204"]]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 188_088), (3.2, 3.9), (-2, 7), (0, 1e-9)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 <= tick <= high + (high - low) * 1e-6 for tick in found)


def test_charts_of_one_point_and_of_nothing() -> None:
    ElementTree.fromstring(curves({"a": [(1, 1)]}, "t", "x", "y", log=True))
    ElementTree.fromstring(bars({"<": [("&", 0.0, "0")]}, '"'))
    assert curves({}, "t", "x", "y") == ""


def test_cells() -> None:
    assert [cell(value) for value in (None, True, 3, 1234567, 0.123456, 45678.9, 1e-7)] == [
        *("", "yes", "3", "1,234,567", "0.123", "45,679", "1e-07"),
    ]
    assert cell({"median": 0.5, "lowest": 0.25, "highest": 0.75}, "share_of_it") == "50.0% (25.0% to 75.0%)"


def test_bad_input_ends_with_2_and_a_cure(tmp_path: Path) -> None:
    empty, old = tmp_path / "empty", tmp_path / "old"
    empty.mkdir()
    old.mkdir()
    (old / "good.json").write_text(json.dumps(results()))
    (old / "a.json").write_text('{"environment": {}}')
    (old / "b.json").write_text("{")
    done = report("--results", str(empty), "--out", str(tmp_path / "page"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no results for a page; first run python benchmarks/throughput.py" in done.stderr
    with pytest.raises(UserError, match=r"a\.json: results in format none(.|\n)*b\.json: cannot be read as JSON"):
        read_all(old)
    done = report("--run", str(empty), "--out", str(tmp_path / "page"))
    assert done.returncode == 2
    assert "has no losses in metrics.jsonl" in done.stderr
    assert not (tmp_path / "page").exists()
