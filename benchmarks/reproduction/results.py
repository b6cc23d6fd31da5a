"""A table as it was measured, beside the paper's, as its file of results has it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from benchmarks.measure import read_results
from benchmarks.reproduction.outcomes import CommandOutcome
from benchmarks.reproduction.verdicts import ClaimVerdict
from finetuning.results import JsonRecord

NO_BREAK = "\u00a0"
"""A space at which no line ends, so that a figure stays with its spread."""


class CellResult(JsonRecord):
    """What a row scores in a column, in the units shown."""

    values: list[float] = Field(default_factory=list)
    """A value for each pre-training; for each restart of fine-tuning where there is one pre-training."""
    wanted: int = 0
    """How many there should be."""
    mean: float | None = None
    spread: float | None = None
    """The standard deviation of the values."""
    error: float | None = None
    """How far the mean may be by the choice of the items."""
    notes: list[str] = Field(default_factory=list)
    """What went wrong, or is to do."""

    @property
    def text(self) -> str:
        """The mean with its spread and the number of seeds, and what is wrong in a few words."""
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
    part: float = 1.0
    """How much of the pre-training lies behind it."""
    fresh: bool = False


class TableResult(JsonRecord):
    """A table as it was measured at a scale."""

    table: str
    title: str
    scale: str
    what: str
    """What the scale is."""
    columns: dict[str, str]
    """Titles of the columns that were measured."""
    paper: dict[str, str]
    """Titles of the paper's columns."""
    averaged: list[str] = Field(default_factory=list)
    """The measured columns of which rows have a mean; none, where the paper has no such column."""
    units: str
    """What a seed is."""
    rows: list[RowResult]
    signals: dict[str, str]
    """Whether columns have a signal, by the row of fresh weights or by what guessing scores: empty where they have."""
    verdicts: list[ClaimVerdict]
    notes: list[str]
    curve: bool = False
    """Whether the rows are places along a run."""
    runs: dict[str, CommandOutcome]
    """What came of every command, by its name."""

    @classmethod
    def read(cls, path: Path) -> TableResult:
        """The table that a file of results has."""
        return cls.model_validate(read_results(path), strict=False)
