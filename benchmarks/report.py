#!/usr/bin/env python3
"""Prints the tables of all results, or writes them into docs/.

    python benchmarks/report.py
    python benchmarks/report.py --docs

Reads every JSON file in benchmarks/results/. With --docs it replaces the text between markers in docs/, and draws the
pictures.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial

from rich.console import Console

from benchmarks.measure import PARTIAL, RESULTS, ROOT, read_results, run_command
from benchmarks.pictures import PICTURES, draw_pictures
from benchmarks.reproduction.outcomes import BENCHMARK
from benchmarks.reproduction.results import TableResult, build_tables
from benchmarks.tables import Results, ResultTable, show, summarise_results
from data_prep.common.errors import UserError, check_all
from data_prep.common.files import replacing

NAMES = ("measurements", "architectures", "mixtures", "reproducing", "training", "search")
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]
MARKED = re.compile(r"(<!-- results of (\w+), written by benchmarks/report.py -->\n).*?(<!-- end of results -->)", re.S)


@dataclass(frozen=True)
class Report:
    """Prints the tables of all results, or writes them into docs/."""

    results: Path = RESULTS
    """Folder with the JSON files of benchmarks."""
    docs: bool = False
    """Write the tables and pictures into docs/ instead of printing the tables."""


def read_all(folder: Path) -> dict[str, Results]:
    """Reads the results in a folder, by file name. Raises UserError if there are none, or some cannot be read."""
    paths = sorted(path for path in folder.glob("*.json") if not path.stem.endswith(PARTIAL))
    if not paths:
        raise UserError(f"{folder}: has no results; first run python benchmarks/throughput.py, or give --results")
    found = check_all(*(partial(read_results, path) for path in paths))
    return dict(zip((path.stem for path in paths), found, strict=True))


def describe_tables(found: Results) -> Iterable[ResultTable]:
    """Returns the tables of a file of results; of the paper's tables, what was measured and has a signal."""
    if found["benchmark"] != BENCHMARK:
        return summarise_results(found)

    def keep(figures: Results) -> Results:
        return {key: one for key, one in figures.items() if not found["signals"].get(key, "").startswith("no signal")}

    kept = {part: keep(found[part]) for part in ("columns", "paper", "signals")}
    judged = [each for each in found["verdicts"] if each["finding"] != "nothing is claimed"]
    rows = [each for each in found["rows"] if any(cell["wanted"] for cell in keep(each["cells"]).values())]
    notes = [each for each in found["notes"] if not each.startswith(("made ", "not asked"))]
    shown = {**found, **kept, "rows": rows, "verdicts": judged, "notes": notes}
    return build_tables(TableResult.model_validate(shown, strict=False))


def format_heading(name: str, found: Results) -> str:
    """Formats the line above the tables of a file of results: the hardware, the day and the file."""
    environment = found["environment"]
    best = next(iter(environment["instruction_sets"]), "instruction sets unknown")
    best += ", to which they are limited" * ("limits" in environment)
    processor = f"{environment['cores']} cores of {environment['processor']} ({best})"
    parts = [each["date"] for each in found.get("models", {}).values() if "date" in each]
    days = [f"{day.day} {day:%B %Y}" for day in map(date.fromisoformat, sorted({environment["date"], *parts}))]
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return ", ".join(filter(None, (environment.get("gpu"), processor, f"{when} (`{name}.json`):")))


def rewrite(text: str, results: Mapping[str, Results]) -> str:
    """Returns a page of documentation with the tables of results between its markers."""

    def tables(match: re.Match[str]) -> str:
        parts = []
        for name, found in results.items():
            if found["benchmark"] == match[2]:
                parts += [format_heading(name, found), *(t.to_markdown() for t in describe_tables(found) if t.rows)]
        return f"{match[1]}\n" + "".join(f"{part}\n\n" for part in parts) + match[3]

    return MARKED.sub(tables, text)


def report(settings: Report, console: Console) -> None:
    """Prints the tables, or writes them and the pictures into the documentation."""
    results = read_all(settings.results)
    if not settings.docs:
        for name, found in results.items():
            console.print(format_heading(name, found), markup=False)
            show(console, describe_tables(found))
        return
    pages = {path: rewrite(path.read_text(encoding="utf-8"), results).encode() for path in PAGES}
    pictures = {PICTURES / name: drawn for name, drawn in draw_pictures(results).items()}
    for path, content in {**pages, **pictures}.items():
        with replacing(path) as file:
            file.write(content)
        console.print(f"written: {path}", markup=False)


if __name__ == "__main__":
    run_command(Report, report)
