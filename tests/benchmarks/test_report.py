"""The page of all results needs nothing else, has no ratio of sides that ran apart, and refuses what it cannot read."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from benchmarks.measure import RESULTS
from benchmarks.report import PAGES, chapter_of_run, day, page, read_all, rewritten, sections
from benchmarks.tables import cell, in_full, times
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
    environment = {
        "date": "2026-01-01",
        "hardware": "avx2-2-cores",
        "processor": "P",
        "cores": 2,
        "instruction_sets": ["avx2"],
    }
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


@pytest.mark.slow
def test_the_page_of_what_is_committed_needs_nothing_else(tmp_path: Path) -> None:
    done = report("--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "index.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert not reader.tags & {"script", "link", "iframe", "object", "embed"}
    inside = [link for link in reader.links if not link.startswith("data:image/svg+xml;base64,")]
    assert inside
    assert all(link.startswith("#") and link[1:] in reader.anchors for link in inside)
    assert "url(" not in text
    assert "@import" not in text
    assert all(path.name in text for path in RESULTS.glob("*.json"))


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
    taken = {"transformers": {"median": 3.0, "lowest": 2.5, "highest": 3.5}}
    turns = contest(times_as_fast_as=taken)
    assert times(turns) == taken
    assert times(contest()) == {}
    both = {"cloze fp32": {"transformers fp32": 2.0}, "cloze bf16": {"transformers fp32": 3.0}}
    found = times({"sides": {"cloze fp32": {}, "transformers fp32": {}}, "times_as_fast": both})
    assert found == {"transformers fp32, ours fp32": 2.0}
    alone = {"sides": {}, "against": {"fp32": {"training": {"cloze_items_per_second": 3.0}}}}
    assert times(alone) == {}


def test_names_in_results_cannot_become_tags() -> None:
    found = {**results(contests={"<b>": contest()}), "<i>": {"<u>": {"<s>": 1}}}
    reader = Reader()
    reader.feed(page(sections({"<a>": found})))
    assert not reader.tags & {"b", "i", "u", "s"}


def test_results_of_any_shape_become_tables() -> None:
    one = {"scaling": "weak", "processes": 1, "sequences_per_second": 5.0, "efficiency": {"median": 1.0}, "ideal": 1.0}
    two = {**one, "processes": 2, "sequences_per_second": 9.0, "efficiency": {"median": 0.9}}
    found = {"points": [one, two], "lists": [[1], [2]], "of": {"a": {"b": {"share": 0.25}}}}
    tables = in_full(results("new", **found, one=12345, curve=list(range(9)), none=[]))
    words = "\n".join(table.markdown() for table in tables)
    assert "| one | 12,345 |" in words
    assert "| weak | 2 | 9 | 0.9 | 1 |" in words
    assert "25.0%" in words
    assert "9 values" in words


def test_the_loss_of_a_run_is_drawn(tmp_path: Path) -> None:
    lines = [
        {"kind": "step", "step": step, "loss": 10 / step, "masked_loss": 9 / step, "time": 1795691054.0}
        for step in range(1, 50)
    ]
    lines.append({"kind": "evaluation", "step": 49, "masked_loss": 0.5, "perplexity": 1.65})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [part] = chapter_of_run(tmp_path).parts
    assert part.chart.startswith("data:image/svg+xml;base64,")
    drawn = base64.b64decode(part.chart.partition(",")[2]).decode()
    assert "<!-- validation -->" in drawn
    step, evaluation = (table.rows for table in part.tables)
    assert [*map(tuple, step)] == [
        ("step", "49"),
        ("loss", "0.204"),
        ("masked loss", "0.184"),
        ("time", "2026-11-26 11:04:14 UTC"),
    ]
    assert ("perplexity", "1.65") in evaluation


def test_days_are_written_as_people_write_them() -> None:
    assert day("2026-11-03") == "3 November 2026"


def test_a_summary_comes_first() -> None:
    turns = {"median": 3.0}, {"median": 2.0}
    contests = {f"base-{128 * n}": contest(times_as_fast_as={"transformers": one}) for n, one in enumerate(turns, 1)}
    first, *_ = sections({"a": results(contests=contests)})
    told = "2 (base at 256, 8 sequences) to 3 (base at 128, 8 sequences)"
    assert first.parts[0].tables[0].rows == [["Steps of pre-training", "transformers", told]]


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
    with pytest.raises(UserError, match=r"has no losses in metrics\.jsonl"):
        chapter_of_run(empty)
    assert not (tmp_path / "page").exists()
