"""How long documents and examples are, for the page of a folder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.common.errors import DamageError
from data_prep.inspection.page.bars import Histogram, make_doubling_histogram, make_even_histogram
from data_prep.inspection.page.kept import KeptDocuments
from data_prep.shards import MANIFEST, Manifest, SetFigures

MOST_SETS = 24
"""Sets of examples that have a row of their own."""
QUANTILES = {"low": 0.05, "middle": 0.5, "high": 0.95}


@dataclass(frozen=True)
class DocumentLengths:
    """How many pieces documents have."""

    documents: int
    files: int
    all_files: int
    histogram: Histogram
    figures: dict[str, int]
    """The pieces of the shortest and of the longest, what a share of them has at most, and the mean."""


@dataclass(frozen=True)
class SetRow:
    """A row of the table of sets of examples."""

    name: str
    figures: SetFigures
    histogram: Histogram


def measure_documents(kept: KeptDocuments) -> DocumentLengths | None:
    """Counts the pieces of documents, by where they end alone; None where there are no documents."""
    ends = [documents.document_ends for documents in kept.read_sample()]
    sizes = np.concatenate([np.empty(0, np.int64), *(np.diff(one, prepend=0) for one in ends)])
    if not len(sizes):
        return None
    middle = {name: int(np.quantile(sizes, share, method="inverted_cdf")) for name, share in QUANTILES.items()}
    figures = {"shortest": int(sizes.min()), **middle, "longest": int(sizes.max()), "mean": round(float(sizes.mean()))}
    histogram = make_doubling_histogram(sizes, "documents")
    return DocumentLengths(len(sizes), len(ends), len(kept.files), histogram, figures)


def make_set_rows(manifest: Manifest) -> list[SetRow]:
    """Makes a row for every set of examples: the first of them, where there are very many."""
    return [_set_row(figures) for figures in manifest.figures[:MOST_SETS]]


def _set_row(figures: SetFigures) -> SetRow:
    """Makes the row of a set; raises DamageError where the manifest lacks the count of a length, or has others."""
    if len(figures.histogram) != figures.length + 1:
        raise DamageError(f"{MANIFEST}: the histogram of {figures.set.folder} has {len(figures.histogram)} counts")
    return SetRow(figures.set.folder, figures, make_even_histogram(figures.histogram, "examples"))
