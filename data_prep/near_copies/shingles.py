"""The words of documents as shingles, which tell how much two documents have in common.

A shingle is five words that follow each other; the whole document is one where it has fewer words. A word is a piece
and the pieces that continue it, so that all of this is read from token documents, without the text; punctuation marks
are words too, and words that the vocabulary does not know are all alike. A shingle is known by 64 bits, its hash: two
different ones of a corpus may have the same hash once in 10^19 pairs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.common.hashing import FACTOR_2
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.tokens import INCREMENT, read_corpus, scramble

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
