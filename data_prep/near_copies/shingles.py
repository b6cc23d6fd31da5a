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
from data_prep.common.hashing import FACTOR_2, GOLDEN, scramble_bits
from data_prep.vocabulary.tokens import read_corpus
from data_prep.vocabulary.vocabulary import VOCABULARY, load_vocabulary

WORDS = 5  # of a shingle
INCREMENT = np.uint64(GOLDEN)
BASE = np.uint64(FACTOR_2)
LEAVING = np.uint64(pow(FACTOR_2, WORDS, 1 << 64))  # what a word counts in the sum when five others follow it
FREE, FIRST, BOTH, SECOND = 0, 1, 2, 3  # which of two documents has the shingle of a slot
scramble = compiled(scramble_bits)


class Texts(NamedTuple):
    """The documents of one file as flat arrays that compiled code reads."""

    pieces: Array  # (pieces,)
    ends: Array  # (documents,) where every document ends in them


def read_texts(path: Path) -> Texts:
    """Maps a file of token documents into memory, of which some are there."""
    corpus = read_corpus(path, 0)
    return Texts(corpus.pieces, corpus.sentence_ends[corpus.document_ends - 1].astype(np.int64))


@functools.lru_cache(maxsize=1)
def continuing(folder: Path, sha256: str) -> Array:  # noqa: ARG001 - the checksum tells one vocabulary from another
    """Tells for every piece of a vocabulary whether it continues a word, once for all tasks of a worker."""
    return load_vocabulary(folder / VOCABULARY, cased=False).continues  # in either case


@compiled
def longest_of(ends):
    """Finds how many pieces the longest document has."""
    longest, start = 0, 0
    for end in ends:
        longest = max(longest, end - start)
        start = end
    return longest


@compiled
def start_of(ends, document):
    """Finds where a document starts."""
    return ends[document - 1] if document else 0


@compiled
def fill_shingles(shingles, pieces, start, stop, continues):
    """Hashes the shingles of the document in pieces[start:stop], some of them more than once; returns how many.

    Words have hashes of their pieces. The sum of those of five words, each times a power of BASE, is that of the last
    shingle times BASE, and the new word, less what the oldest word counts in it by then.
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
def room_for(count):
    """Says how many slots it takes to compare documents that have so many shingles together."""
    size = 2
    while size < 2 * count:
        size *= 2
    return size


@compiled
def jaccard(first, second, slots, owners):
    """Computes how many of the different shingles of two documents are in both: their Jaccard index.

    `slots` and `owners` are what a hash table is made in, with room for them at least.
    """
    size = room_for(first.size + second.size)
    for slot in range(size):
        owners[slot] = FREE
    mask = np.uint64(size - 1)
    common, union = 0, 0
    for shingle in first:
        slot = shingle & mask
        while owners[slot] != FREE and slots[slot] != shingle:
            slot = (slot + np.uint64(1)) & mask
        if owners[slot] == FREE:
            slots[slot], owners[slot] = shingle, FIRST
            union += 1
    for shingle in second:
        slot = shingle & mask
        while owners[slot] != FREE and slots[slot] != shingle:
            slot = (slot + np.uint64(1)) & mask
        if owners[slot] == FREE:
            slots[slot], owners[slot] = shingle, SECOND
            union += 1
        elif owners[slot] == FIRST:
            owners[slot] = BOTH
            common += 1
    return common / union
