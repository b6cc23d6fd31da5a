"""Encodes sentences with a table of the words that were met before, so that each distinct word is cut once.

Real text repeats itself (words.py): what is done for a new word may be slow.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.vocabulary.encoders.encoder import Pieces, TextEncoder
from data_prep.vocabulary.encoders.words import WordTable

TABLE_BYTES = 16 << 20  # the table of words starts anew beyond this, so that memory stays bounded


class CutWords(NamedTuple):
    """The pieces of several words."""

    ids: Array  # pieces of all words
    starts: Array  # (words,) where the pieces of every word start in ids
    stops: Array  # (words,) and where they stop
    sizes: Array | None = None  # (words, 2) characters of every word, and of its parts that became [UNK]


class TableEncoder(TextEncoder):
    """Encodes sentences word by word, and remembers the pieces of every word."""

    def __init__(self, make_words: Callable[[], WordTable]) -> None:
        """`make_words` makes an empty table of words."""
        self._make_words = make_words
        self._forget()

    def _forget(self) -> None:
        """Begins with no words, so that memory stays bounded however many words a corpus has."""
        self._words = self._make_words()
        self._ids = np.empty(0, np.int32)  # pieces of all words
        self._starts = self._stops = np.empty(0, np.int64)  # where the pieces of every word are in _ids
        self._sizes = np.empty((0, 2), np.int64)  # as in CutWords

    @abstractmethod
    def cut_words(self, letters: Array, ends: Array) -> CutWords:
        """Cuts words, of which each ends in `letters` where `ends` says."""

    def encode(self, text: Array, ends: Array) -> Pieces:
        """Cuts the sentences of `text` into pieces; `text` is bytes of UTF-8, in which the sentences end at `ends`."""
        if self._words.num_bytes > TABLE_BYTES:
            self._forget()
        numbers, word_ends = self._words.number(text, ends)
        self._learn()
        beyond = self._words.num_beyond  # of words that are [UNK] for their length
        return Pieces(*_spell(numbers, word_ends, beyond, self._ids, self._starts, self._stops, self._sizes))

    def _learn(self) -> None:
        """Cuts the words that are new in the table into pieces, and keeps those."""
        if len(self._words) == len(self._starts):
            return
        ids, starts, stops, sizes = self.cut_words(*self._words.letters(first=len(self._starts)))
        before = len(self._ids)
        self._ids = np.concatenate([self._ids, ids])
        self._starts = np.concatenate([self._starts, before + starts])
        self._stops = np.concatenate([self._stops, before + stops])
        if sizes is not None:
            self._sizes = np.concatenate([self._sizes, sizes])


@compiled
def _spell(numbers, word_ends, beyond, ids, starts, stops, sizes):
    """Puts the pieces of the words one after another; returns them, where every sentence ends, and the sum of sizes."""
    total, characters, lost = 0, beyond, beyond
    for word in numbers:
        total += stops[word] - starts[word]
        if sizes.size:
            characters += sizes[word, 0]
            lost += sizes[word, 1]
    pieces = np.empty(total, np.int32)
    piece_ends = np.empty(word_ends.size, np.int64)
    count, first = 0, 0
    for sentence in range(word_ends.size):
        for word in numbers[first : word_ends[sentence]]:
            for at in range(starts[word], stops[word]):
                pieces[count] = ids[at]
                count += 1
        piece_ends[sentence] = count
        first = word_ends[sentence]
    return pieces, piece_ends, characters, lost
