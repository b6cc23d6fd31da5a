"""A measured table beside the paper's: its results file, and how it is shown as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pydantic import Field

from benchmarks.reproduction.outcomes import CommandOutcome
from benchmarks.tables import ResultTable
from finetuning.results import JsonRecord

NO_BREAK = "\u00a0"
"""Keeps a figure and its spread on one line."""


class CellResult(JsonRecord):
    """The scores of a row in a column, in the units shown."""

    values: list[float] = Field(default_factory=list)
    """A value for each pre-training, or for each fine-tuning of a single pre-training."""
    wanted: int = 0
    """The planned number of values."""
    mean: float | None = None
    spread: float | None = None
    """The standard deviation of the values."""
    error: float | None = None
    """The standard error of a value over items, as the mean over the values."""
    notes: list[str] = Field(default_factory=list)
    """Errors, and commands still to do."""

    @property
    def text(self) -> str:
        """The mean with its spread and the number of seeds, and short notes."""
        counted = f"{len(self.values)}" + (f" of {self.wanted}" if len(self.values) < self.wanted else "")
        told = [] if self.mean is None else [f"{self.mean:.1f}"]
        told += [] if self.spread is None else [f"± {self.spread:.1f}"]
        told += [f"({counted})"] if self.values and (self.wanted > 1) else []
        figures = " ".join(told).replace(" ", NO_BREAK)
        return " ".join(filter(None, [figures, *dict.fromkeys(note.partition(":")[0] for note in self.notes)]))


class RowResult(JsonRecord):
    """A row of the table."""

    name: str
    cells: dict[str, CellResult]
    paper: dict[str, float]


class ClaimVerdict(JsonRecord):
    """The verdict on a claim in a column."""

    claim: str
    better: str
    """The row that is claimed to be better, or the first of two equal ones."""
    worse: str
    column: str
    finding: str
    """The result of the test, and its scope if it does not hold for all models."""
    why: str
    """The evidence, in words."""
    difference: float | None = None
    """The difference of the means, in the units shown."""
    interval: list[float] | None = None
    """The 95% confidence interval of the difference."""
    p: float | None = None
    """The p value."""


class TableResult(JsonRecord):
    """A table at a scale."""

    table: str
    title: str
    scale: str
    what: str
    """The description of the scale."""
    columns: dict[str, str]
    """Titles of the measured columns."""
    paper: dict[str, str]
    """Titles of the paper's columns."""
    units: str
    """What the values of a cell are, in words."""
    rows: list[RowResult]
    signals: dict[str, str]
    """Why a column has no signal, beside fresh weights or guessing; empty if it has one."""
    verdicts: list[ClaimVerdict]
    notes: list[str]
    runs: dict[str, CommandOutcome]
    """The outcomes of commands, by name."""


def build_tables(result: TableResult) -> Iterator[ResultTable]:
    """Yields three tables: our scores beside the paper's, the verdicts on its claims, and notes."""
    yield build_scores_table(result)
    yield build_claims_table(result)
    yield ResultTable("", ["notes"], [[note] for note in [*result.notes, *list_troubles(result)]])


def build_scores_table(result: TableResult) -> ResultTable:
    """Builds the table of our scores beside the paper's, with a last row of signals."""
    paper = {name: title for name, title in result.paper.items() if any(name in row.paper for row in result.rows)}
    head = ["", *result.columns.values(), *(f"paper: {title}" for title in paper.values())]
    rows = []
    for row in result.rows:
        shown = [row.cells[name].text if name in row.cells else "" for name in result.columns]
        published = [f"{row.paper[name]:g}" if name in row.paper else "" for name in paper]
        rows.append([row.name, *shown, *published])
    if any(result.signals.values()):
        told = ["", *(result.signals.get(name) or "" for name in result.columns)]
        rows.append([*told, *[""] * (len(head) - len(told))])
    title = f"{result.title}, scale {result.scale}. Mean ± spread over {result.units}"
    return ResultTable(title, head, rows)


def build_claims_table(result: TableResult) -> ResultTable:
    """Builds the table of verdicts on claims."""
    rows, before = [], ""
    for each in result.verdicts:
        column = result.columns[each.column]
        rows.append([each.claim * (each.claim != before), each.better, each.worse, column, each.finding, each.why])
        before = each.claim
    return ResultTable("What is claimed", ["claim", "better", "worse", "column", "found", "how sure"], rows)


def list_troubles(result: TableResult) -> list[str]:
    """Lists errors in full, each once, with the rows in which they occurred."""
    said: dict[str, dict[str, None]] = {}
    for row in result.rows:
        for note in chain.from_iterable(cell.notes for cell in row.cells.values()):
            if not note.startswith(("no data", "to do", "one answer")):
                said.setdefault(note, {})[row.name] = None
    return [f"{note} ({', '.join(rows)})" for note, rows in said.items()]
