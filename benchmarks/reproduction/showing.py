"""A table that was measured, in words: for the console, for the page of report.py, and for docs/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reproduction.results import RowResult, TableResult
from benchmarks.tables import ResultTable


def read_table_result(found: Mapping[str, Any]) -> TableResult:
    """A table from its file of results."""
    return TableResult.model_validate(found, strict=False)


def reproduction(found: Mapping[str, Any]) -> Iterator[ResultTable]:
    """The tables of a file of results."""
    return tables_of(read_table_result(found))


def tables_of(result: TableResult) -> Iterator[ResultTable]:
    """Ours beside the paper's; what holds of what is claimed; and what is to be said of both."""
    paper = {name: title for name, title in result.paper.items() if any(name in row.paper for row in result.rows)}
    head = ["", *result.columns.values(), *(f"paper: {title}" for title in paper.values())]
    rows = [[row.name, *cells_of(row, result), *values_of(row, paper)] for row in result.rows]
    no_signal = {name: why for name, why in result.signals.items() if why}
    if no_signal:
        rows.append(["signal", *(no_signal.get(name, "yes") for name in result.columns), *[""] * len(paper)])
    yield ResultTable(f"{result.title}, scale {result.scale}: mean ± spread over {result.units}", head, rows)
    claims = []
    before = ""
    for each in result.verdicts:
        relation = f"{each.better} > {each.worse}" if each.claim else ""
        said = each.claim if each.claim != before else ""
        claims.append([said, relation, result.columns.get(each.column, each.column), each.finding, each.why])
        before = each.claim
    yield ResultTable("What is claimed", ["claim", "rows", "column", "found", "how sure"], claims)
    for name, texts in [("masks", result.masked)] if result.masked else []:
        yield ResultTable(
            f"How {name} are drawn",
            ["row", "a sentence"],
            [[row, text] for row, many in texts.items() for text in many],
        )
    yield ResultTable("", ["to be said"], [[note] for note in [*result.notes, *troubles_of(result)]])
    places = [[row.name, place] for row in result.rows for place in row.processors]
    kinds = {place for _, place in places}
    if len(kinds) > 1:
        yield ResultTable("Where rows were computed", ["row", "processor"], places)


def cells_of(row: RowResult, result: TableResult) -> Iterator[str]:
    """The cells of a row in words."""
    for name in result.columns:
        yield row.cells[name].text if name in row.cells else ""


def values_of(row: RowResult, paper: Mapping[str, str]) -> Iterator[str]:
    """The paper's values of a row."""
    for name in paper:
        yield f"{row.paper[name]:g}" if name in row.paper else ""


def troubles_of(result: TableResult) -> list[str]:
    """What went wrong in rows, in full, each once."""
    said: dict[str, None] = {}
    for row in result.rows:
        for name, cell in row.cells.items():
            for note in cell.notes:
                if not note.startswith(("no data", "to do", "one answer")):
                    said[f"{row.name}, {result.columns[name]}: {note}"] = None
    return list(said)
