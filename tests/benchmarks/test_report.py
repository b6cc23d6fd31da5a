"""The tables of results are those of docs/, have no ratio of sides that ran apart, and refuse what they cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.measure import RESULTS
from benchmarks.report import PAGES, Report, read_all, report, rewrite
from benchmarks.tables import format_cell, list_ratios, show_contest
from data_prep.common.errors import UserError


def results(benchmark: str = "throughput", **found: Any) -> dict[str, Any]:
    """A file of results."""
    machine = {"hardware": "avx2-2-cores", "processor": "P", "cores": 2, "instruction_sets": ["avx2"]}
    environment = {"date": "2026-11-03", **machine}
    return {"format": 2, "benchmark": benchmark, "environment": environment, **found}


def contest(**more: Any) -> dict[str, Any]:
    """A contest whose sides took no turns, unless more is said."""
    speed = {"median": 10.0, "lowest": 9.0, "highest": 11.0}
    side = {
        "sequences_per_second": speed,
        "share_of_ceiling": {"median": 0.5},
        "real_pieces_per_second": {"median": 1e3},
    }
    return {"sequences": 8, "sides": {"cloze": side, "transformers": side}, **more}


def test_the_tables_of_docs_are_those_of_the_results() -> None:
    """Where this fails: python benchmarks/report.py --docs."""
    found = read_all(RESULTS)
    for path in PAGES:
        text = path.read_text()
        assert "<!-- results of " in text
        assert rewrite(text, found) == text, f"{path.name} is stale: python benchmarks/report.py --docs"
    stale = PAGES[0].read_text().replace("| base at", "| huge at")
    assert rewrite(stale, found) == PAGES[0].read_text()


def test_a_ratio_is_printed_only_of_sides_in_turns() -> None:
    taken = {"transformers": {"median": 3.0, "lowest": 2.5, "highest": 3.5}}
    turns = contest(times_as_fast_as=taken)
    assert list_ratios(turns) == taken
    assert list_ratios(contest()) == {}
    both = {"cloze fp32": {"transformers fp32": 2.0}, "cloze bf16": {"transformers fp32": 3.0}}
    found = list_ratios({"sides": {"cloze fp32": {}, "transformers fp32": {}}, "times_as_fast": both})
    assert found == {"transformers fp32, ours fp32": 2.0}
    alone = {"sides": {}, "against": {"fp32": {"training": {"cloze_items_per_second": 3.0}}}}
    assert list_ratios(alone) == {}


def test_results_and_contests_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new.json").write_text(json.dumps(results(contests={"base-128": contest(times_as_fast_as={"p": 3.0})})))
    report(Report(tmp_path), Console(width=200))
    shown = capsys.readouterr().out
    assert shown.startswith("2 cores of P (avx2), 3 November 2026 (`new.json`):")
    assert re.search(r"base at 128, 8 sequences +1,000 +50.0% +3\b", shown)
    show_contest(Console(width=200), "base-128", contest(times_as_fast_as={"transformers": {"median": 3.0}}))
    shown = capsys.readouterr().out
    assert re.search(r"transformers +10 +50.0% +1,000", shown)
    assert re.search(r"times as fast *\n *transformers *\n *3\b", shown)


def test_cells() -> None:
    assert [format_cell(value) for value in (None, True, 3, 1234567, 0.123456, 45678.9, 1e-7)] == [
        *("", "yes", "3", "1,234,567", "0.123", "45,679", "1e-07"),
    ]
    assert format_cell({"median": 0.5, "lowest": 0.25, "highest": 0.75}, "share_of_it") == "50.0% (25.0% to 75.0%)"


def test_bad_input_is_told_with_a_cure(tmp_path: Path) -> None:
    empty, old = tmp_path / "empty", tmp_path / "old"
    empty.mkdir()
    old.mkdir()
    (old / "good.json").write_text(json.dumps(results()))
    (old / "a.json").write_text('{"environment": {}}')
    (old / "b.json").write_text("{")
    with pytest.raises(UserError, match=r"has no results; first run python benchmarks/throughput.py"):
        read_all(empty)
    with pytest.raises(UserError, match=r"a\.json: results in format none(.|\n)*b\.json: cannot be read as JSON"):
        read_all(old)
