"""The summary of a table: means and spreads over seeds, and verdicts on claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

from benchmarks.reproduction.commands import TableCell, order_commands
from benchmarks.reproduction.declaration import LEFT_OUT, Claim, Declared, Row, TableColumn
from benchmarks.reproduction.inputs import find_lacking
from benchmarks.reproduction.outcomes import HELD_OUT, PAIRS, PERPLEXITY, CommandOutcome, Score
from benchmarks.reproduction.results import CellResult, RowResult, TableResult
from benchmarks.reproduction.running import Ledger
from benchmarks.reproduction.verdicts import ClaimVerdict, compute_spread, has_signal, judge

NOT_CHECKED = "not checked"
"""The signal of a column without scores of fresh weights or a known score of guessing."""
FIGURES = {"pairs": (PAIRS, "accuracy"), "perplexity": (HELD_OUT, PERPLEXITY)}
"""The split and the figure of columns without fine-tuning."""


class TableSummary:
    """Summarises the outcomes of a table."""

    def __init__(self, declared: Declared, cells: Sequence[TableCell], ledger: Ledger) -> None:
        self._declared, self._cells, self.ledger = declared, cells, ledger
        self._lacking = find_lacking(declared)

    def summarise(self) -> TableResult:
        """Returns the table."""
        d, commands = self._declared, order_commands(self._cells)
        rows = [row for row in d.table.rows if not row.hidden and (row in d.rows or row.paper)]
        made = {row.name: self._row(row) for row in rows}
        signals = {name: self._signal(name, column, made) for name, column in d.measured.items()}
        outcomes = {command.name: outcome for command in commands if (outcome := self.ledger.find(command)[1])}
        return TableResult(
            table=d.name,
            title=d.title,
            scale=d.scale_name,
            what=d.scale.what,
            columns={name: column.title for name, column in d.measured.items()},
            paper={name: d.columns[name].title for name in d.table.columns},
            averaged=d.averaged,
            units=f"{d.seeds} pre-trainings" if d.seeds > 1 else f"{count_fine_tunings(d)} of one pre-training",
            rows=list(made.values()),
            signals=signals,
            verdicts=list(self._verdicts(made, signals)),
            notes=[*self._notes(), *self.ledger.describe_commits(commands)],
            curve=d.table.curve,
            runs=outcomes,
        )

    def _row(self, row: Row) -> RowResult:
        """Returns a row with its cells; one that is not run has the paper's values alone."""
        cells = {}
        for name in self._declared.list_columns(row) if row in self._declared.rows else ():
            own = [cell for cell in self._cells if (cell.row, cell.column) == (row.name, name)]
            cells[name] = self._cell(self._declared.measured[name], own, row, self._lacking.get(name, ""))
        scale = self._declared.scale
        part = (scale.find_checkpoint(row.part) or scale.steps) / scale.steps
        return RowResult(name=row.name, cells=cells, paper=row.paper, part=part, fresh=row.fresh)

    def _cell(self, column: TableColumn, cells: Sequence[TableCell], row: Row, lacks: str) -> CellResult:
        """Returns the scores of a row in a column."""
        if lacks:
            return CellResult(notes=[f"no data: {lacks}"])
        if not cells:
            return CellResult()
        several = self._declared.seeds > 1 and not row.fresh
        restarts = self._declared.restarts if column.is_tuned else 1
        values, errors, notes = [], [], []
        for cell in cells:
            own = []
            for score, trouble in self._scores(cell):
                notes += [trouble] * bool(trouble)
                value, error = read_figure(score, column) if score else (None, None)
                if value is not None:
                    own.append(value)
                    errors.append(error)
            values += [fmean(own)] if several and own else own
        known = [error for error in errors if error is not None]
        return CellResult(
            values=[round(value, 4) for value in values],
            wanted=self._declared.seeds if several else restarts,
            mean=fmean(values) if values else None,
            spread=compute_spread(values),
            error=fmean(known) if known else None,
            notes=notes,
        )

    def _scores(self, cell: TableCell) -> Iterator[tuple[Score | None, str]]:
        """Yields the scores of a cell, each with a note."""
        for need in cell.command.list_needs():
            outcome = self.ledger.find(need)[1]
            if outcome is not None and not outcome.is_well:
                yield None, describe_trouble(outcome)
                return
        standing, outcome = self.ledger.find(cell.command)
        if outcome is None:
            yield None, f"{standing}: {cell.command.label}"
        elif not outcome.is_well:
            yield None, describe_trouble(outcome)
        for score in outcome.scores if outcome is not None and outcome.is_well else ():
            told = f"failed: seed {score.seed}: {score.failed}" if score.failed else ""
            yield (None if score.failed else score), told or "one answer for all: degenerate" * score.degenerate

    def _signal(self, name: str, column: TableColumn, made: dict[str, RowResult]) -> str:
        """Describes why a column has no signal; empty if it has one, NOT_CHECKED if unknown."""
        fresh = next((row for row in self._declared.rows if row.fresh), None)
        pre_trained = fresh.model if fresh else self._best(name, made)
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

    def _best(self, name: str, made: dict[str, RowResult]) -> str:
        """Returns the row with the best score in a column; empty if there is none."""
        scores = {row.name: row.cells[name].mean for row in made.values() if name in row.cells}
        known = {row: score for row, score in scores.items() if score is not None}
        return max(known, key=lambda row: known[row], default="")

    def _verdicts(self, made: dict[str, RowResult], signals: dict[str, str]) -> Iterator[ClaimVerdict]:
        """Yields the verdicts on all claims, in their columns and in those that stand beside the paper's."""
        d = self._declared
        there = [row.name for row in d.rows]
        for claim in d.table.claims:
            columns = dict.fromkeys(map(d.find_stand_in, claim.columns))
            beside = () if claim.within else d.table.beside
            for name in [each for each in (*columns, *beside) if each != LEFT_OUT]:
                for better, worse in claim.list_pairs(there):
                    first, second = (made[each].cells.get(name) for each in (better, worse))
                    if first and second and not (name in beside and self._same_model(better, worse)):
                        yield self._verdict(claim, (better, worse), name, first, second, signals[name])

    def _same_model(self, *names: str) -> bool:
        """Whether rows have the same pre-trained model, and differ in fine-tuning alone."""
        rows = [self._declared.table.find_row(name) for name in names]
        return len({(row.model or row.name, row.part) for row in rows}) == 1

    def _verdict(
        self, claim: Claim, rows: tuple[str, str], name: str, first: CellResult, second: CellResult, signal: str
    ) -> ClaimVerdict:
        """Returns the verdict on a claim about two rows in a column."""
        about = partial(ClaimVerdict, claim=claim.text, better=rows[0], worse=rows[1], column=name)
        lost = next((note for cell in (first, second) for note in cell.notes), "")
        no_signal = signal if signal != NOT_CHECKED else ""
        if no_signal or lost or not first.values or not second.values:
            return about(finding="nothing is claimed", why=no_signal or lost or "not measured")
        sign = -1.0 if self._declared.columns[name].lower_is_better else 1.0
        own, others = ([sign * value for value in cell.values] for cell in (first, second))
        judged, how, found = judge(own, others, claim.within)
        scope = " of this model" if self._same_model(*rows) else " of these two models"
        is_of_all = self._declared.seeds > 1 or judged in ("not sure", "nothing is claimed")
        return about(
            finding=judged if is_of_all else judged + scope,
            why=f"{how}; signal {NOT_CHECKED}" if signal else how,
            difference=fmean(own) - fmean(others),
            interval=[found.low, found.high] if found else None,
            p=found.p if found else None,
        )

    def _notes(self) -> list[str]:
        """Lists the differences from the paper."""
        d = self._declared
        instead: dict[str, list[str]] = {}
        for name, other in d.replaced.items():
            told = f"{d.columns[other].title} in its place" if other else "left out at this scale"
            instead.setdefault(told, []).append(d.columns[name].title)
        notes = [f"{', '.join(titles)}: {told}" for told, titles in instead.items()]
        notes += [f"{d.columns[name].title}: no data: {lacks}" for name, lacks in self._lacking.items()]
        if d.scale.pairs:
            words = " ".join(d.scale.pairs)
            pairs = [column for column in d.measured.values() if column.entry == "pairs"]
            notes += [f"{column.title}: run_pairs.py {words}" for column in pairs]
        if d.seeds > 1:
            notes += [f"{row.name}: {count_fine_tunings(d)} of fresh weights" for row in d.rows if row.fresh]
        there = {row.name for row in d.rows}
        left_out = [claim.text for claim in d.table.claims if len(there & {*claim.rows}) < 2]
        return notes + [f"not asked at this scale: {text}" for text in left_out]


def count_fine_tunings(declared: Declared) -> str:
    """Says how often each model is fine-tuned, such as "3 fine-tunings"."""
    return f"{declared.restarts} fine-tuning{'s' * (declared.restarts > 1)}"


def describe_trouble(outcome: CommandOutcome) -> str:
    """Describes a command that failed or diverged."""
    return outcome.said if outcome.diverged else f"failed: {outcome.label}: {outcome.said}"


def read_figure(score: Score, column: TableColumn) -> tuple[float | None, float | None]:
    """Reads the figure that a column shows, and its standard error over items, in the units shown."""
    split, figure = FIGURES.get(column.entry, (column.split or next(iter(score.figures), ""), column.figure))
    figures = score.figures.get(split, {})
    name = figure or next(reversed(figures), "")
    found = (figures.get(name), score.errors.get(split, {}).get(name))
    value, error = (None if each is None else column.unit * each for each in found)
    return value, error
