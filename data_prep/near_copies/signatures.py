"""Near copies, first step: every document gets keys, of which two documents likely share one where they are alike.

How much two documents have in common their shingles tell: five words that follow each other; the whole document is one
where it has fewer words. A word is a piece and the pieces that continue it, so that all of this is read from token
documents, without the text; punctuation marks are words too, and words that the vocabulary does not know are all alike.
A shingle is known by 64 bits, its hash: two different ones of a corpus may have the same hash once in 10^19 pairs.

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

import functools
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
from data_prep.common.hashing import FACTOR_2, hash_key
from data_prep.running import NumberedTask
from data_prep.shards import WORK
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.tokens import INCREMENT, TokenFiles, read_corpus, scramble
from data_prep.work import Record, make_numbered_path

WORDS = 5  # of a shingle
BASE = np.uint64(FACTOR_2)
LEAVING = np.uint64(pow(FACTOR_2, WORDS, 1 << 64))  # BASE^WORDS, the factor of the word that leaves the sum
FREE, FIRST, BOTH, SECOND = 0, 1, 2, 3  # which of two documents has the shingle of a slot


class Texts(NamedTuple):
    """The documents of one file as flat arrays that compiled code reads."""

    pieces: Array  # (pieces,)
    bounds: Array  # (documents + 1,) where every document begins in them; at the end, where the last one ends


def read_texts(path: Path) -> Texts:
    """Maps a file of token documents, at least one, into memory."""
    corpus = read_corpus(path, 0)
    return Texts(corpus.pieces, np.append(0, corpus.sentence_ends[corpus.document_ends - 1]))


@functools.lru_cache(maxsize=1)
def load_continues(folder: Path, sha256: str) -> Array:  # noqa: ARG001 - the checksum tells one vocabulary from another
    """Loads for every piece of a vocabulary whether it continues a word; a worker loads it once."""
    return load_vocabulary(folder, cased=False).continues  # in either case


@compiled
def fill_shingles(shingles, pieces, start, stop, continues):
    """Hashes the shingles of the document in pieces[start:stop], repeated ones too; returns their number.

    A rolling hash of WORDS words, each hashed from its pieces: new sum = sum * BASE + new - oldest * BASE^WORDS.
    """
    recent = np.zeros(WORDS, np.uint64)
    words, count, at = 0, 0, start
    total = np.uint64(0)
    while at < stop:
        word = scramble(np.uint64(pieces[at]) + INCREMENT)
        at += 1
        while at < stop and continues[pieces[at]]:
            word = scramble(word ^ np.uint64(pieces[at])) + INCREMENT
            at += 1
        oldest = words % WORDS
        total = total * BASE + word - recent[oldest] * LEAVING
        recent[oldest] = word
        words += 1
        if words >= WORDS:
            shingles[count] = scramble(total)
            count += 1
    if not count and words:
        shingles[0] = scramble(total)
        count = 1
    return count


@compiled
def count_slots(count):
    """Computes the number of slots for comparing two documents that have `count` shingles together."""
    size = 2
    while size < 2 * count:
        size *= 2
    return size


@compiled
def jaccard(first, second, slots, owners):
    """Computes the Jaccard index of two documents: the share of their distinct shingles that are in both.

    `slots` and `owners` are memory for a hash table, as large as count_slots says at least.
    """
    size = count_slots(first.size + second.size)
    for slot in range(size):
        owners[slot] = FREE
    mask = np.uint64(size - 1)
    common, union = 0, 0
    for owner in (FIRST, SECOND):
        for shingle in first if owner == FIRST else second:
            slot = shingle & mask
            while owners[slot] != FREE and slots[slot] != shingle:
                slot = (slot + np.uint64(1)) & mask
            if owners[slot] == FREE:
                slots[slot], owners[slot] = shingle, owner
                union += 1
            elif owner == SECOND and owners[slot] == FIRST:
                owners[slot] = BOTH
                common += 1
    return common / union


@compiled
def compare_pairs(later, earlier, later_rows, earlier_rows, continues, threshold, originals, indices, first):
    """Compares pairs of documents of two files, unless the later one is known to be a near copy; counts these pairs.

    Notes near copies in `originals` and `indices`; `first` is the number of the first document of the earlier file.
    """
    most = np.diff(later.bounds).max() + np.diff(earlier.bounds).max()
    shingles, slots = np.empty(most, np.uint64), np.empty(count_slots(most), np.uint64)
    owners = np.empty(slots.size, np.uint8)
    compared = 0
    for pair in range(later_rows.size):
        row, other = later_rows[pair], earlier_rows[pair]
        if originals[row] >= 0:
            continue
        count = fill_shingles(shingles, later.pieces, later.bounds[row], later.bounds[row + 1], continues)
        rest = shingles[count:]
        more = fill_shingles(rest, earlier.pieces, earlier.bounds[other], earlier.bounds[other + 1], continues)
        compared += 1
        index = jaccard(shingles[:count], rest[:more], slots, owners)
        if index >= threshold:
            originals[row], indices[row] = other + first, index
    return compared


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
