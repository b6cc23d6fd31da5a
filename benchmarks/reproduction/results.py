"""The results file of a table: measured scores beside the paper's."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from benchmarks.measure import read_results
from benchmarks.reproduction.outcomes import CommandOutcome
from benchmarks.reproduction.verdicts import ClaimVerdict
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
    """The standard error of the mean over items."""
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
    part: float = 1.0
    """The share of the pre-training that is done."""
    fresh: bool = False


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
    averaged: list[str] = Field(default_factory=list)
    """The columns in the mean of a row; none if the paper has no mean."""
    units: str
    """What the values of a cell are, in words."""
    rows: list[RowResult]
    signals: dict[str, str]
    """Why a column has no signal, beside fresh weights or guessing; empty if it has one."""
    verdicts: list[ClaimVerdict]
    notes: list[str]
    curve: bool = False
    """Whether the rows are points along a run."""
    runs: dict[str, CommandOutcome]
    """The outcomes of commands, by name."""

    @classmethod
    def read(cls, path: Path) -> TableResult:
        """Reads the table from a results file."""
        return cls.model_validate(read_results(path), strict=False)
