"""How long documents and examples are, for the page of a folder: histograms as bars that fit any width.

Of the documents in pieces, a sample is read if they are many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data_prep.arrow_files import map_batches, name_damage, read_batch
from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.origins import find_origins_of_folder
from data_prep.shards import MANIFEST, KeptFile, Manifest, SetFigures
from data_prep.vocabulary.tokens import make_token_schema

MOST_FILES = 64
"""Files of documents that are read, each of at most 16 MB of text or one document."""

Item = TypeVar("Item")


class Documents(NamedTuple):
    """The documents of a file as flat arrays."""

    source: str
    pieces: Array
    sentence_ends: Array
    """Where every sentence ends in the pieces."""
    document_ends: Array
    """Where every document ends in the pieces."""


class KeptDocuments(NamedTuple):
    """All files of documents that are there, in the order of the corpus, each with the folder that has it."""

    files: list[tuple[Path, KeptFile]]
    vocabulary_size: int

    @property
    def sample(self) -> list[tuple[Path, KeptFile]]:
        """Chooses some files from all over the corpus: all of them, where they are few."""
        return choose_evenly(self.files, MOST_FILES)

    def read_sample(self) -> Iterator[Documents]:
        """Maps the chosen files into memory, one after another."""
        for folder, record in self.sample:
            yield read_documents(folder, record, self.vocabulary_size)


def find_kept(folder: Path, manifest: Manifest) -> KeptDocuments:
    """Finds the documents in pieces, those of other folders too; none, where they were not kept or are gone."""
    try:
        origins = list(find_origins_of_folder(folder, str(folder)))
    except DamageError:
        raise
    except UserError:
        origins = []
    files = [(origin.folder, record) for origin in origins for record in origin.manifest.kept]
    return KeptDocuments(files, manifest.vocabulary_size)


def read_documents(folder: Path, record: KeptFile, vocabulary_size: int) -> Documents:
    """Maps a file of documents into memory; raises DamageError unless it has the columns and counts of its record."""
    path = record.find(folder)
    with name_damage(path, "damaged"):
        batch = read_batch(map_batches(path), 0, path)
        if batch.schema != make_token_schema(vocabulary_size) or batch.num_rows != record.rows:
            raise DamageError(f"{path}: its rows or columns are not those of its record")
        sentences = batch["sentences"].values
        bounds = np.asarray(sentences.offsets)
        document_ends = bounds[np.asarray(batch["sentences"].offsets)[1:]]
        if (np.diff(document_ends, prepend=0) < 1).any():
            raise DamageError(f"{path}: has a document without pieces")
        return Documents(record.source, np.asarray(sentences.values), bounds[1:], document_ends)


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Chooses at most `most` items, evenly spread, with the first."""
    if len(items) <= most:
        return list(items)
    return [items[number * len(items) // most] for number in range(most)]


MOST_BARS = 32
MOST_TICKS = 5
"""Numbers below a chart, for which a phone has room."""
LAST_TICK = 0.7
"""How far to the right such a number begins, in shares of the width, so that the one at the end has room."""
MOST_SETS = 24
"""Sets of examples that have a row of their own."""
QUANTILES = {"low": 0.05, "middle": 0.5, "high": 0.95}


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its count, and its height in percent of the highest bar."""

    label: str
    count: int
    height: float


class Tick(NamedTuple):
    """A number below a chart."""

    label: str
    place: float
    """Where it stands, in percent of the width."""


class Histogram(NamedTuple):
    """A histogram: what its bars count, and of what."""

    counted: str
    bars: list[Bar]
    ticks: list[Tick]
    end: str
    """The number at the right end."""

    @property
    def highest(self) -> Bar:
        """The highest bar, the first of several."""
        return max(self.bars, key=lambda bar: bar.count)


def make_doubling_histogram(sizes: Array, counted: str) -> Histogram:
    """Counts sizes, from 1 on, in ranges each of which is twice as wide as the one before: 1, 2 to 3, 4 to 7, …"""
    counts = np.bincount(np.frexp(sizes)[1] - 1).tolist()
    first = next(exponent for exponent, count in enumerate(counts) if count)
    ranges = [(2**exponent, 2 ** (exponent + 1) - 1) for exponent in range(first, len(counts))]
    return _histogram(counted, ranges, counts[first:])


def make_even_histogram(counts: Sequence[int], counted: str) -> Histogram:
    """Adds up the counts of every size, from 0 on, in some ranges of the same width."""
    last = len(counts) - 1
    width = max(1, -(-last // MOST_BARS))
    ranges = [(start, min(start + width - 1, last)) for start in range(1, last + 1, width)]
    return _histogram(counted, ranges, [sum(counts[start : end + 1]) for start, end in ranges])


def _histogram(counted: str, ranges: list[tuple[int, int]], counts: Sequence[int]) -> Histogram:
    """Makes the bars of ranges, and the numbers where some begin, and where the last ends."""
    most = max([*counts, 1])
    labels = [f"{start:,}" if start == end else f"{start:,} to {end:,}" for start, end in ranges]
    bars = [Bar(label, count, 100 * count / most) for label, count in zip(labels, counts, strict=True)]
    step = -(-len(ranges) // MOST_TICKS)
    places = [at for at in range(0, len(ranges), step) if at <= LAST_TICK * len(ranges)]
    ticks = [Tick(f"{ranges[at][0]:,}", 100 * at / len(ranges)) for at in places]
    return Histogram(counted, bars, ticks, f"{ranges[-1][1]:,}" if len(ranges) > 1 else "")


class DocumentLengths(NamedTuple):
    """How many pieces documents have."""

    documents: int
    files: int
    all_files: int
    histogram: Histogram
    figures: dict[str, int]
    """The pieces of the shortest and of the longest, what a share of them has at most, and the mean."""


class SetRow(NamedTuple):
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


def make_set_row(figures: SetFigures) -> SetRow:
    """Makes the row of a set; raises DamageError where the manifest lacks the count of a length, or has others."""
    if len(figures.histogram) != figures.length + 1:
        raise DamageError(f"{MANIFEST}: the histogram of {figures.set.folder} has {len(figures.histogram)} counts")
    return SetRow(figures.set.folder, figures, make_even_histogram(figures.histogram, "examples"))
