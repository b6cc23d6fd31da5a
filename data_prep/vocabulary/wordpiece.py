"""Cuts sentences into WordPiece ids equal to those of transformers' BertTokenizerFast, several times as fast.

How that is exact and why it is fast, the module words.py says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.vocabulary.words import WordTable

TABLE_BYTES = 64 << 20  # the table of words starts anew beyond this, so that memory stays bounded


@dataclass(frozen=True)
class Pieces:
    """The pieces of several sentences, one sentence after another."""

    ids: Array  # (pieces,) int32
    ends: Array  # (sentences,) where every sentence ends in ids


class FastWordPiece:
    """Encodes sentences with a pipeline of `tokenizers`, which is asked only once for every distinct word."""

    def __init__(self, pipeline: Tokenizer, cased: bool) -> None:
        self._pipeline, self._cased = pipeline, cased
        self._forget()

    def _forget(self) -> None:
        """Begins with no words, so that memory stays bounded however many words a corpus has."""
        self._table = WordTable(self._cased)
        self._ids = np.empty(0, np.int32)  # pieces of all words
        self._ends = np.empty(0, np.int64)  # where every word ends in _ids

    def encode(self, text: Array, ends: Array) -> Pieces:
        """Cuts the sentences of `text` into pieces; `text` is bytes of UTF-8, in which the sentences end at `ends`."""
        if self._table.num_bytes > TABLE_BYTES:
            self._forget()
        numbers, word_ends = self._table.number(text, ends)
        self._learn()
        return Pieces(*_spell(numbers, word_ends, self._ids, self._ends))

    def _learn(self) -> None:
        """Has the pipeline cut the words that are new in the table into pieces, and keeps those."""
        new = self._table.words(first=len(self._ends))
        encodings = self._pipeline.encode_batch_fast(new, add_special_tokens=False)
        ids = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        if ids:
            last = self._ends[-1] if len(self._ends) else 0
            self._ids = np.concatenate([self._ids, *ids])
            self._ends = np.concatenate([self._ends, last + np.cumsum([len(word) for word in ids])])


@compiled
def _spell(numbers, word_ends, ids, ends):
    """Puts the pieces of the words one after another; returns them, and where every sentence ends."""
    total = 0
    for word in numbers:
        total += ends[word] - (ends[word - 1] if word else 0)
    pieces = np.empty(total, np.int32)
    piece_ends = np.empty(word_ends.size, np.int64)
    count, first = 0, 0
    for sentence in range(word_ends.size):
        for word in numbers[first : word_ends[sentence]]:
            for at in range(ends[word - 1] if word else 0, ends[word]):
                pieces[count] = ids[at]
                count += 1
        piece_ends[sentence] = count
        first = word_ends[sentence]
    return pieces, piece_ends
