"""Near copies, first step: every document gets keys, of which two documents likely share one where they are alike.

A signature is of minima: the smallest number that each of some hash functions gives for any shingle of a document. Two
documents have the same minimum with a chance that is the Jaccard index of their shingles (Broder 1997). Minima are
taken together in bands of some rows each, and the key of a band stands for all of its minima. So two documents share a
key with the chance 1 - (1 - jaccard^rows)^bands, which leaps from near 0 to near 1.

Time grows with the words, and so does the disk: 12 bytes for each band of a document. A worker holds the keys of one
file of token documents, and every such file is opened once.

The files of a corpus are divided into stretches: some files that follow each other, one where there are few, more where
there are more than MOST_STRETCHES. So a corpus has a bounded number of stretches, however large it is, and a file that
is opened once for each of them is opened a bounded number of times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import make_schema, write_batches
from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.common.hashing import hash_key
from data_prep.near_copies.shingles import Texts, fill_shingles, load_continues, read_texts
from data_prep.running import NumberedTask
from data_prep.shards import WORK
from data_prep.vocabulary.tokens import INCREMENT, TokenFiles, scramble
from data_prep.work import Record, make_numbered_path

PATH = f"{WORK}/near-parts.arrow"
MOST_STRETCHES = 128


@dataclass(frozen=True)
class Stretches(TokenFiles):
    """The files of token documents, divided into stretches of files that follow each other."""

    @cached_property
    def bounds(self) -> list[int]:
        """Lists the files with which the stretches begin; at the end, how many files there are."""
        count = len(self.paths)
        return [*range(0, count, max(1, -(-count // MOST_STRETCHES))), count]

    @property
    def num_stretches(self) -> int:
        """Counts the stretches."""
        return len(self.bounds) - 1

    def stretch(self, number: int) -> range:
        """Returns the numbers of the files of a stretch."""
        return range(self.bounds[number], self.bounds[number + 1])

    def find_documents(self, number: int) -> tuple[int, int]:
        """Returns the numbers of the first document of a stretch and of the first one after it."""
        files = self.stretch(number)
        return int(self.firsts[files.start]), int(self.firsts[files.stop])


def read_stretches(folder: Path) -> Stretches:
    """Reads the list of files in an output folder."""
    return Stretches.read(folder / PATH)


STEP = "signatures"
SCHEMA = make_schema(key=pa.uint64(), row=pa.uint32())
MOST_MINIMA = 128  # of a signature
FOUND = 0.95  # chance at least that two documents share a key whose Jaccard index is the threshold
LARGEST = np.uint32(0xFFFFFFFF)


class Banding(NamedTuple):
    """How minima are taken together."""

    bands: int
    rows: int


def choose_banding(threshold: float) -> Banding:
    """Chooses as many rows as MOST_MINIMA allow if FOUND of the pairs at the threshold are to share a key.

    More rows leave fewer pairs below the threshold to be compared. What is above the threshold is found more surely:
    from 0.8 on, 99% of all pairs where each index is as likely as the others. At 0.8, these are 13 bands of 7 rows.
    """
    choices = (Banding(_count_bands(threshold, rows), rows) for rows in range(1, MOST_MINIMA + 1))
    return [one for one in choices if one.bands * one.rows <= MOST_MINIMA][-1]


def _count_bands(threshold: float, rows: int) -> int:
    """Counts the bands of `rows` rows with which FOUND of the pairs at the threshold share a key."""
    missed = math.log1p(-(threshold**rows))  # the logarithm of the chance that a band is not shared
    return math.ceil(math.log(1 - FOUND) / missed) if missed else MOST_MINIMA + 1


@dataclass(frozen=True)
class SignTask(NumberedTask):
    """Asks a worker for the keys of the documents of a stretch."""

    banding: Banding
    vocabulary_sha256: str


def make_sign_tasks(folder: Path, parts: Stretches, banding: Banding, vocabulary_sha256: str) -> Iterator[SignTask]:
    """Makes a task of every stretch."""
    before = np.concatenate([[0], np.cumsum(parts.pieces)])
    for number, pieces in enumerate(np.diff(before[parts.bounds]).tolist()):
        yield SignTask(folder, number, pieces, banding, vocabulary_sha256)


def sign(task: SignTask) -> Record:
    """Writes the keys of a stretch: a record batch for each of its files, sorted by key and then by document."""
    parts, continues = read_stretches(task.folder), load_continues(task.folder, task.vocabulary_sha256)
    paths = (task.folder / parts.path(part) for part in parts.stretch(task.number))
    batches = (_sort_keys(compute_keys(read_texts(path), continues, task.banding)) for path in paths)
    return Record(files=[write_batches(task.folder, make_numbered_path(STEP, task.number), SCHEMA, batches)])


def compute_keys(texts: Texts, continues: Array, banding: Banding) -> Array:
    """Computes the keys of documents: a row for each, with a key for each band."""
    numbers = np.arange(2 * banding.bands * banding.rows)
    factors, summands = ((hash_key(numbers) >> np.uint64(32)).astype(np.uint32)).reshape(2, -1)
    keys = np.empty((len(texts.bounds) - 1, banding.bands), np.uint64)
    _fill_keys(keys, texts, continues, factors | np.uint32(1), summands)
    return keys


def _sort_keys(keys: Array) -> pa.RecordBatch:
    """Sorts keys; beside each stands the row of its document."""
    flat = keys.ravel()
    order = np.argsort(flat, kind="stable")
    rows = (order // keys.shape[1]).astype(np.uint32)
    return pa.record_batch([pa.array(flat[order]), pa.array(rows)], schema=SCHEMA)


@compiled
def _fill_keys(keys, texts, continues, factors, summands):
    """Computes the keys of all documents of a file."""
    shingles = np.empty(np.diff(texts.bounds).max(), np.uint64)
    minima = np.empty(factors.size, np.uint32)
    num_bands = keys.shape[1]
    rows = factors.size // num_bands
    for document in range(keys.shape[0]):
        count = fill_shingles(shingles, texts.pieces, texts.bounds[document], texts.bounds[document + 1], continues)
        _fill_minima(minima, shingles[:count], factors, summands)
        for band in range(num_bands):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                key = scramble(key ^ np.uint64(minima[row])) + INCREMENT
            keys[document, band] = scramble(key)


@compiled
def _fill_minima(minima, shingles, factors, summands):
    """Finds the smallest number that each hash function gives for any of the shingles.

    The functions multiply and add, modulo 2^32, which processors do for sixteen functions at once.
    """
    for function in range(minima.size):
        minima[function] = LARGEST
    for shingle in shingles:
        high = np.uint32(shingle >> np.uint64(32))
        for function in range(minima.size):
            number = np.uint32(factors[function] * high + summands[function])
            minima[function] = min(minima[function], number)
