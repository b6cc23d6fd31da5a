"""Lists what was left out of a folder and why: counts from the manifest, and examples from its tables."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from data_prep.common.errors import DamageError
from data_prep.inspection.figures import describe_held_out, describe_limits, format_percent
from data_prep.shards import NEAR_REPORT, CorpusFigures, Manifest

MOST_ROWS = 20
LONGEST_CELL = 300
"""Characters of a value of a table that are shown."""


@dataclass(frozen=True)
class Reason:
    """A reason for which something was left out."""

    name: str
    count: int
    of: str
    """The unit of the count: documents or places."""
    meaning: str


@dataclass(frozen=True)
class Examples:
    """A table of what was left out, or of the first of it."""

    name: str
    file: str
    head: list[str]
    shown: list[list[str]]


def count_documents_before(corpus: CorpusFigures) -> int:
    """Counts the documents with text before any was left out for its content."""
    left_out = (corpus.copies, corpus.near_copies, corpus.over_share, *(corpus.filtered or {}).values())
    return corpus.documents + sum(count or 0 for count in left_out)


def list_reasons(manifest: Manifest) -> Iterator[Reason]:
    """Goes through the reasons for which documents were left out, in the order in which it was done."""
    corpus, settings = manifest.corpus, manifest.settings
    yield Reason("unreadable", len(corpus.skipped), "places", f"could not be read (--errors {settings.errors})")
    yield Reason("without text", corpus.empty, "documents", "no piece was left once they were cut")
    for name, count in (corpus.filtered or {}).items():
        yield Reason(name, count, "documents", "did not pass this filter")
    if corpus.copies is not None:
        yield Reason("copies", corpus.copies, "documents", "an earlier document has the same text")
    if corpus.near_copies is not None:
        share = format_percent(settings.near_copies or 1)
        meaning = f"{share} at least in common with an earlier document; some are in {NEAR_REPORT}"
        yield Reason("near copies", corpus.near_copies, "documents", meaning)
    if corpus.over_share is not None:
        yield Reason("over share", corpus.over_share, "documents", f"drawn at random: {describe_limits(manifest)}")


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
