"""How long the documents of a folder are, and how its vocabulary cuts their words, for the page of the folder.

Of the documents in pieces, a sample is read if they are many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from data_prep.arrow_files import name_damage
from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.inspection.lookup import read_kept, require_known
from data_prep.origins import find_origins_of_folder
from data_prep.shards import KeptFile
from data_prep.vocabulary.vocabulary import Vocabulary

MOST_FILES = 64
"""Files of documents that are read, each of at most 16 MB of text or one document."""
MOST_BARS = 32

Item = TypeVar("Item")


class Documents(NamedTuple):
    """The documents of a file as flat arrays."""

    source: str
    pieces: Array
    sentence_ends: Array
    """Where every sentence ends in the pieces."""
    document_ends: Array
    """Where every document ends in the pieces."""


def find_kept(folder: Path) -> list[tuple[Path, KeptFile]]:
    """Lists the files of documents in pieces in the order of the corpus, each with the folder that has it.

    There are none where they were not kept or are gone.
    """
    try:
        origins = list(find_origins_of_folder(folder, str(folder)))
    except DamageError:
        raise
    except UserError:
        origins = []
    return [(origin.folder, record) for origin in origins for record in origin.manifest.kept]


def map_sample(kept: list[tuple[Path, KeptFile]], vocabulary_size: int) -> list[Documents]:
    """Maps some files from all over the corpus into memory: all of them, where they are few."""
    return [map_documents(folder, record, vocabulary_size) for folder, record in choose_evenly(kept, MOST_FILES)]


def map_documents(folder: Path, record: KeptFile, vocabulary_size: int) -> Documents:
    """Maps a file of documents into memory; raises DamageError where it is damaged."""
    path = record.find(folder)
    with name_damage(path, "damaged"):
        documents = read_kept(path, record.rows, vocabulary_size)["sentences"]
        bounds = np.asarray(documents.values.offsets)
        document_ends = bounds[np.asarray(documents.offsets)[1:]]
        if (np.diff(document_ends, prepend=0) < 1).any():
            raise DamageError(f"{path}: has a document without pieces")
        return Documents(record.source, np.asarray(documents.values.values), bounds[1:], document_ends)


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Chooses at most `most` items, evenly spread, with the first."""
    if len(items) <= most:
        return list(items)
    return [items[number * len(items) // most] for number in range(most)]


class Bar(NamedTuple):
    """A bar of a histogram: how many documents or examples have from `first` to `last` pieces."""

    first: int
    last: int
    number: int


def make_doubling_bars(sizes: Array) -> list[Bar]:
    """Counts sizes, from 1 on, in ranges each of which is twice as wide as the one before: 1, 2 to 3, 4 to 7, …"""
    counts = np.bincount(np.frexp(sizes)[1] - 1).tolist()
    bars = (Bar(2**exponent, 2 ** (exponent + 1) - 1, count) for exponent, count in enumerate(counts))
    return list(dropwhile(lambda bar: not bar.number, bars))


def make_even_bars(counts: Sequence[int]) -> list[Bar]:
    """Adds up the counts of every size, from 0 on, in some ranges of the same width."""
    last = len(counts) - 1
    width = max(1, -(-last // MOST_BARS))
    ranges = ((start, min(start + width - 1, last)) for start in range(1, last + 1, width))
    return [Bar(start, end, sum(counts[start : end + 1])) for start, end in ranges]


class Lengths(NamedTuple):
    """How many pieces documents have."""

    documents: int
    bars: list[Bar]
    quantiles: list[int]
    """The pieces of the shortest, what 5%, 50% and 95% have at most, and those of the longest."""
    mean: int


def measure_lengths(sample: list[Documents]) -> Lengths | None:
    """Counts the pieces of documents; None where there are no documents."""
    if not sample:
        return None
    sizes = np.concatenate([np.diff(one.document_ends, prepend=0) for one in sample])
    quantiles = np.quantile(sizes, (0, 0.05, 0.5, 0.95, 1), method="inverted_cdf").astype(int).tolist()
    return Lengths(len(sizes), make_doubling_bars(sizes), quantiles, round(float(sizes.mean())))


MOST_PIECES = 2_000_000
"""Pieces whose words are counted, from all over the corpus."""
MOST_NUMBER = 6
"""Words of at least this number of pieces are counted together."""


class Cuts(NamedTuple):
    """How many words of a source are cut into how many pieces."""

    source: str
    counts: list[int]
    """How many words have one piece, two and so on, then MOST_NUMBER pieces or more; the last are unknown words."""
    pieces: int
    """Pieces of all these words."""


class Words(NamedTuple):
    """How the words of the first sentences of some files are cut."""

    documents: int
    total: Cuts
    by_source: list[Cuts]


def count_word_cuts(folder: Path, sample: list[Documents], vocabulary: Vocabulary) -> Words | None:
    """Counts how words are cut; None where there are no documents. Punctuation marks are no words."""
    each, parts, documents = MOST_PIECES // max(1, len(sample)), defaultdict[str, list[Array]](list), 0
    for one in sample:
        pieces, begun = _take_first_sentences(one, each)
        parts[one.source].append(pieces)
        documents += begun
    if not documents:
        return None
    ends = np.cumsum([sum(map(len, some)) for some in parts.values()])
    pieces = np.concatenate([one for some in parts.values() for one in some])
    require_known([pieces.max()], vocabulary, f"{folder}: its documents have")
    begins = ~vocabulary.continues[pieces]
    begins[[0, *ends[ends < len(pieces)]]] = True
    starts = np.flatnonzero(begins)
    is_word = np.array([any(map(str.isalnum, piece)) for piece in vocabulary.spellings])[pieces[starts]]
    starts, sizes = starts[is_word], np.diff(starts, append=len(pieces))[is_word]
    columns = np.where(pieces[starts] == vocabulary.special.unk, MOST_NUMBER, np.minimum(sizes, MOST_NUMBER) - 1)
    sources = np.searchsorted(ends, starts, side="right")

    def count(source: str, chosen: Array | slice) -> Cuts:
        counts = np.bincount(columns[chosen], minlength=MOST_NUMBER + 1).tolist()
        return Cuts(source, counts, int(sizes[chosen].sum()))

    by_source = [count(source, sources == number) for number, source in enumerate(parts)]
    return Words(documents, count("all", slice(None)), by_source)


def _take_first_sentences(documents: Documents, most: int) -> tuple[Array, int]:
    """Returns the pieces of the first sentences of a file, `most` at most, and the number of their documents."""
    number = np.searchsorted(documents.sentence_ends, most, side="right")
    end = int(documents.sentence_ends[number - 1]) if number else 0
    begun = int(np.searchsorted(documents.document_ends, end, side="left")) + 1 if end else 0
    return documents.pieces[:end], begun
