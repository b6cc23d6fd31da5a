"""A measured table beside the paper: means and spreads over seeds, signals of columns, verdicts on the claims of the
paper, and how all this is kept and shown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from pydantic import Field
from scipy import stats

from benchmarks.reproduction.commands import TableCell, find_lacking, list_cells, order_commands
from benchmarks.reproduction.declaration import LEFT_OUT, Claim, Row, ScaledTable, TableColumn
from benchmarks.reproduction.outcomes import HELD_OUT, PAIRS, PERPLEXITY, CommandOutcome, Ledger, Score
from benchmarks.tables import ResultTable
from finetuning.results import JsonRecord

NO_BREAK = "\u00a0"
"""Keeps a figure and its spread on one line."""
NOT_CHECKED = "not checked"
"""The signal of a column without scores of fresh weights or a known score of guessing."""
FIGURES = {"pairs": (PAIRS, "accuracy"), "perplexity": (HELD_OUT, PERPLEXITY)}
"""The split and the figure of columns without fine-tuning."""
LEVEL = 0.05
"""The significance level."""
SPREADS = 2.0
"""The number of spreads by which a pre-trained model must exceed fresh weights."""
Finding = Literal["holds", "does not hold", "not sure", "nothing is claimed"]
"""Results of the test."""


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
        """The mean with its spread, the number of seeds if some are missing, and short notes."""
        told = [] if self.mean is None else [f"{self.mean:.1f}"]
        told += [] if self.spread is None else [f"± {self.spread:.1f}"]
        told += [f"({len(self.values)} of {self.wanted})"] if 0 < len(self.values) < self.wanted else []
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


class TableResult(JsonRecord):
    """A table at a scale."""

    table: str
    title: str
    scale: str
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


class TableSummary:
    """Summarises the outcomes of a table."""

    def __init__(self, declared: ScaledTable, ledger: Ledger) -> None:
        self._declared, self._ledger = declared, ledger
        self._cells, self._lacking = list_cells(declared), find_lacking(declared)

    def summarise(self) -> TableResult:
        """Returns the table."""
        d, commands = self._declared, order_commands(self._cells)
        rows = [row for row in d.table.rows if not row.hidden and (row in d.rows or row.paper)]
        made = {row.name: self._summarise_row(row) for row in rows}
        signals = {name: self._describe_signal(name, made) for name in d.measured}
        return TableResult(
            table=d.name,
            title=d.title,
            scale=d.scale_name,
            columns={name: column.title for name, column in d.measured.items()},
            paper={name: d.columns[name].title for name in d.table.columns},
            units=f"{d.seeds} pre-trainings" if d.seeds > 1 else f"{count_fine_tunings(d)} of one pre-training",
            rows=list(made.values()),
            signals=signals,
            verdicts=list(self._list_verdicts(made, signals)),
            notes=self._list_notes(),
            runs={each.name: outcome for each in commands if (outcome := self._ledger.find(each)[1])},
        )

    def _summarise_row(self, row: Row) -> RowResult:
        """Returns a row with its cells; one that is not run has the paper's values alone."""
        names = self._declared.list_columns(row) if row in self._declared.rows else ()
        cells = {name: self._summarise_cell(row, name) for name in names}
        return RowResult(name=row.name, cells=cells, paper=row.paper)

    def _summarise_cell(self, row: Row, name: str) -> CellResult:
        """Returns the scores of a row in a column."""
        if name in self._lacking:
            return CellResult(notes=[f"no data: {self._lacking[name]}"])
        cells = [cell for cell in self._cells if (cell.row, cell.column) == (row.name, name)]
        if not cells:
            return CellResult()
        column, seeds, restarts = self._declared.columns[name], self._declared.seeds, self._declared.restarts
        found = [[*self._list_figures(cell)] for cell in cells]
        values = [[value for value, _, _ in of_seed if value is not None] for of_seed in found]
        several = seeds > 1 and not row.fresh
        shown = [fmean(of_seed) for of_seed in values if of_seed] if several else [*chain(*values)]
        errors = [error for value, error, _ in chain(*found) if value is not None and error is not None]
        return CellResult(
            values=[round(value, 4) for value in shown],
            wanted=seeds if several else restarts if column.is_tuned else 1,
            mean=fmean(shown) if shown else None,
            spread=compute_spread(shown),
            error=fmean(errors) if errors else None,
            notes=[note for _, _, note in chain(*found) if note],
        )

    def _list_figures(self, cell: TableCell) -> Iterator[tuple[float | None, float | None, str]]:
        """Yields the figure of each score of a cell, its standard error, and a note."""
        needed = (self._ledger.find(need)[1] for need in cell.command.list_needs())
        standing, own = self._ledger.find(cell.command)
        if lost := next((each for each in (*needed, own) if each is not None and not each.is_well), None):
            yield None, None, lost.said if lost.diverged else f"failed: {lost.label}: {lost.said}"
        elif own is None:
            yield None, None, f"{standing}: {cell.command.label}"
        for score in own.scores if own is not None and not lost else ():
            if score.failed:
                yield None, None, f"failed: seed {score.seed}: {score.failed}"
            else:
                figure = read_figure(score, self._declared.columns[cell.column])
                yield *figure, "one answer for all: degenerate" * score.degenerate

    def _describe_signal(self, name: str, made: dict[str, RowResult]) -> str:
        """Describes why a column has no signal; empty if it has one, NOT_CHECKED if unknown."""
        column = self._declared.columns[name]
        fresh = next((row for row in self._declared.rows if row.fresh), None)
        means = {row.name: row.cells[name].mean for row in made.values() if name in row.cells}
        known = {row: mean for row, mean in means.items() if mean is not None}
        pre_trained = fresh.model if fresh else max(known, key=lambda row: known[row], default="")
        base = made[pre_trained].cells.get(name) if pre_trained else None
        other = made[fresh.name].cells.get(name) if fresh else None
        if column.lower_is_better or base is None or (column.chance is None and other is None):
            return NOT_CHECKED
        against = [column.chance] if column.chance is not None else other.values if other else []
        if not base.values or not against:
            return "not measured yet"
        errors = [each.error for each in (base, other) if each and each.error is not None]
        if has_signal(base.values, against, errors):
            return ""
        told = "guessing" if column.chance is not None or not fresh else fresh.name
        return f"no signal: {pre_trained} {fmean(base.values):.1f}, {told} {fmean(against):.1f}"

    def _list_verdicts(self, made: dict[str, RowResult], signals: dict[str, str]) -> Iterator[ClaimVerdict]:
        """Yields the verdicts on all claims, in their columns and in those that stand beside the paper's."""
        d = self._declared
        there = [row.name for row in d.rows]
        for claim in d.table.claims:
            columns = dict.fromkeys(map(d.find_stand_in, claim.columns))
            beside = () if claim.within else d.table.beside
            for name in [each for each in (*columns, *beside) if each != LEFT_OUT]:
                for pair in claim.list_pairs(there):
                    cells = [made[row].cells[name] for row in pair if name in made[row].cells]
                    if len(cells) == 2 and not (name in beside and self._have_same_model(pair)):
                        yield self._compare_rows(claim, pair, name, cells, signals[name])

    def _have_same_model(self, names: Sequence[str]) -> bool:
        """Whether rows have the same pre-trained model, and differ in fine-tuning alone."""
        rows = map(self._declared.table.find_row, names)
        return len({(row.model or row.name, row.part) for row in rows}) == 1

    def _compare_rows(
        self, claim: Claim, rows: tuple[str, str], name: str, cells: Sequence[CellResult], signal: str
    ) -> ClaimVerdict:
        """Returns the verdict on a claim about two rows in a column."""
        about = partial(ClaimVerdict, claim=claim.text, better=rows[0], worse=rows[1], column=name)
        trouble = next(chain(*(cell.notes for cell in cells)), "")
        no_signal = signal if signal != NOT_CHECKED else ""
        if no_signal or trouble or not all(cell.values for cell in cells):
            return about(finding="nothing is claimed", why=no_signal or trouble or "not measured")
        sign = -1.0 if self._declared.columns[name].lower_is_better else 1.0
        first, second = ([sign * value for value in cell.values] for cell in cells)
        found = compare_samples(first, second, claim.within)
        scope = " of this model" if self._have_same_model(rows) else " of these two models"
        is_scoped = self._declared.seeds == 1 and found.finding in ("holds", "does not hold")
        return about(
            finding=found.finding + scope * is_scoped,
            why=f"{found.why}; signal {NOT_CHECKED}" if signal else found.why,
        )

    def _list_notes(self) -> list[str]:
        """Lists the differences from the paper."""
        d = self._declared
        instead: dict[str, list[str]] = {}
        for name, other in zip(d.table.columns, map(d.find_stand_in, d.table.columns), strict=True):
            told = f"{d.columns[other].title} in its place" if other else "left out at this scale"
            if other != name:
                instead.setdefault(told, []).append(d.columns[name].title)
        notes = [f"{', '.join(titles)}: {told}" for told, titles in instead.items()]
        notes += [f"{d.columns[name].title}: no data: {lacks}" for name, lacks in self._lacking.items()]
        if d.scale.pairs:
            pairs = [column for column in d.measured.values() if column.entry == "pairs"]
            notes += [f"{column.title}: run_pairs.py {' '.join(d.scale.pairs)}" for column in pairs]
        if d.seeds > 1:
            notes += [f"{row.name}: {count_fine_tunings(d)} of fresh weights" for row in d.rows if row.fresh]
        there = {row.name for row in d.rows}
        left_out = [claim.text for claim in d.table.claims if len(there & {*claim.rows}) < 2]
        return notes + [f"not asked at this scale: {text}" for text in left_out]


def count_fine_tunings(declared: ScaledTable) -> str:
    """Says how often each model is fine-tuned, such as "3 fine-tunings"."""
    return f"{declared.restarts} fine-tuning{'s' * (declared.restarts > 1)}"


def read_figure(score: Score, column: TableColumn) -> tuple[float | None, float | None]:
    """Reads the figure that a column shows, and its standard error over items, in the units shown."""
    split, figure = FIGURES.get(column.entry, (column.split or next(iter(score.figures), ""), column.figure))
    figures = score.figures.get(split, {})
    name = figure or next(reversed(figures), "")
    found = (figures.get(name), score.errors.get(split, {}).get(name))
    value, error = (None if each is None else column.unit * each for each in found)
    return value, error


class Comparison(NamedTuple):
    """The result of a comparison of two samples."""

    finding: Finding
    why: str
    """The evidence, in words."""


def compute_spread(values: Sequence[float]) -> float | None:
    """Computes the standard deviation over seeds; None for a single one."""
    return stdev(values) if len(values) > 1 else None


def compare_samples(first: Sequence[float], second: Sequence[float], within: float | None = None) -> Comparison:
    """Tests whether the first sample is above the second or, with `within`, equal up to this distance. The test is
    Welch's, which allows unequal variances; it needs two seeds of each sample, and a variance."""
    difference, is_single = fmean(first) - fmean(second), min(len(first), len(second)) < 2
    if is_single or stdev(first) == stdev(second) == 0:
        return Comparison("nothing is claimed", f"{'one seed' if is_single else 'no spread'}: {difference:+.1f}")
    found = stats.ttest_ind(first, second, equal_var=False)
    p, (low, high) = float(found.pvalue), map(float, found.confidence_interval(1 - LEVEL))
    finding: Finding = "not sure"
    if within is not None:
        why = f"between {low:+.1f} and {high:+.1f}"
        if -within < low and high < within:
            finding = "holds"
        elif low > within or high < -within:
            finding = "does not hold"
    else:
        why = f"{difference:+.1f}, p = {p:.2g}, {low:+.1f} to {high:+.1f}"
        if p < LEVEL:
            finding = "holds" if difference > 0 else "does not hold"
    return Comparison(finding, why)


def has_signal(base: Sequence[float], fresh: Sequence[float], errors: Sequence[float]) -> bool:
    """Whether a pre-trained model is two spreads above fresh weights. The spread is the largest of those over seeds and
    of the `errors` over items, since two seeds may be close by chance."""
    own = [each for each in (compute_spread(base), compute_spread(fresh)) if each is not None]
    widest = max([*own, *errors], default=math.inf)
    return fmean(base) - fmean(fresh) > SPREADS * widest


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
        told = ["", *(result.signals.get(name, "").partition(":")[0] for name in result.columns)]
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
    return ResultTable("Claims of the paper", ["claim", "better", "worse", "column", "found", "how sure"], rows)


def list_troubles(result: TableResult) -> list[str]:
    """Lists errors in full, each once, with the rows in which they occurred."""
    said: dict[str, dict[str, None]] = {}
    for row in result.rows:
        for note in chain.from_iterable(cell.notes for cell in row.cells.values()):
            if not note.startswith(("no data", "to do", "one answer")):
                said.setdefault(note, {})[row.name] = None
    return [f"{note} ({', '.join(rows)})" for note, rows in said.items()]
