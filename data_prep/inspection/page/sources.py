"""Makes the tables of the sources of a folder: their text, before and after documents were left out, and why.

Counts are from the manifest, and examples of what was left out from the tables of the folder.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data_prep.common.errors import DamageError
from data_prep.inspection.figures import Reason, describe_held_out, format_percent, list_reasons
from data_prep.shards import KeptFile, Manifest, RecordedSettings

MOST_SOURCES = 50
"""Sources that have a row of their own; the others, which have the least text, share one."""


@dataclass(frozen=True)
class SourceRow:
    """A row of the table of sources."""

    name: str
    files: int
    found: Counter[str] = field(default_factory=Counter)
    """Documents, pieces and bytes of text as they were read."""
    documents: int = 0
    """Documents that are left."""
    asked: str = ""
    """The weight and the largest share that were given."""
    examples: float | None = None
    """The share of the pieces of some training examples."""


def make_source_rows(manifest: Manifest, kept: Iterable[KeptFile], in_examples: Counter[str]) -> list[SourceRow]:
    """Makes a row for every source, in the order of the corpus.

    `in_examples` has how many pieces of some training examples are of every source, as far as that is known.
    """
    files = Counter(file.source for file in manifest.sources)
    found = dict[str, Counter[str]]()
    for record in kept:
        counts = {"documents": record.rows, "pieces": record.pieces, "bytes": record.text_bytes}
        found.setdefault(record.source, Counter()).update(counts)
    left = manifest.corpus.documents_by_source
    rows = [
        SourceRow(
            name=name,
            files=files[name],
            found=found.get(name, Counter()),
            documents=left.get(name, 0),
            asked=_asked_for(name, manifest.settings),
            examples=in_examples[name] / max(1, in_examples.total()) if in_examples else None,
        )
        for name in dict.fromkeys((*files, *found, *left))
    ]
    return _with_others(rows)


def _asked_for(source: str, settings: RecordedSettings) -> str:
    """Spells the weight and the largest share of a source, if they were given."""
    weight, share = settings.weight.get(source), settings.max_share.get(source)
    said = ("" if weight is None else f"{weight:g} times", "" if share is None else f"at most {format_percent(share)}")
    return ", ".join(filter(None, said))


def _with_others(rows: list[SourceRow]) -> list[SourceRow]:
    """Joins the sources with the least text to one row, where there are more than the page has rows for."""
    if len(rows) <= MOST_SOURCES:
        return rows
    ordered = sorted(range(len(rows)), key=lambda at: (-rows[at].found["pieces"], -rows[at].documents, at))
    own = sorted(ordered[: MOST_SOURCES - 1])
    others = [rows[at] for at in ordered[MOST_SOURCES - 1 :]]
    shares = [row.examples for row in others if row.examples is not None]
    joined = SourceRow(
        name=f"{len(others):,} others",
        files=sum(row.files for row in others),
        found=sum((row.found for row in others), Counter()),
        documents=sum(row.documents for row in others),
        examples=sum(shares) if shares else None,
    )
    return [*(rows[at] for at in own), joined]


MOST_ROWS = 20
LONGEST_CELL = 300
"""Characters of a value of a table that are shown."""


class Examples(NamedTuple):
    """A table of what was left out, or of the first of it."""

    name: str
    file: str
    head: list[str]
    shown: list[list[str]]


def list_all_reasons(manifest: Manifest) -> list[Reason]:
    """Lists the reasons for which anything was left out, in the order in which it was done."""
    corpus = manifest.corpus
    unreadable = f"could not be read (--errors {manifest.settings.errors})"
    return [
        Reason("unreadable", len(corpus.skipped), unreadable, of="places"),
        Reason("without text", corpus.empty, "no piece was left once they were cut"),
        *list_reasons(manifest),
    ]


def describe_validation(manifest: Manifest) -> str:
    """Describes the documents held out for validation; "" if there are none."""
    corpus = manifest.corpus
    what = "documents " if corpus.passages is None else ""
    return f"{corpus.validation_documents:,} {what}{describe_held_out(manifest)}" if corpus.validation_documents else ""


def read_example_tables(folder: Path, manifest: Manifest) -> list[Examples]:
    """Reads the first rows of every CSV file among the tables of a folder."""
    records = [record for record in manifest.tables if record.path.endswith(".csv")]
    return [_read_table(record.find(folder), record.path) for record in records]


def _read_table(path: Path, name: str) -> Examples:
    """Reads the head and the first rows of a table, with long values cut."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            lines = [[_shortened(value) for value in row] for row in islice(csv.reader(file), MOST_ROWS + 1)]
    except (csv.Error, OSError) as error:
        raise DamageError(f"{path}: cannot be read: {error}") from error
    head, shown = (lines[0], lines[1:]) if lines else ([], [])
    return Examples(PurePosixPath(name).stem.replace("-", " "), name, head, shown)


def _shortened(value: str) -> str:
    """Cuts a long text, and shows that it goes on."""
    return value if len(value) <= LONGEST_CELL else f"{value[:LONGEST_CELL]}…"
