"""WordPiece ids of sentences: equal to transformers' BertTokenizerFast, several times as fast (words.py says how)."""

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
    """The pieces of some sentences, one after another."""

    ids: Array  # (pieces,) int32
    ends: Array  # (sentences,) where each sentence ends in ids


class FastWordPiece:
    """Encodes sentences with a `tokenizers` pipeline, asking it only once for each distinct word."""

    def __init__(self, pipeline: Tokenizer, cased: bool) -> None:
        self._pipeline, self._cased = pipeline, cased
        self._forget()

    def _forget(self) -> None:
        self._table = WordTable(self._cased)
        self._ids = np.empty(0, np.int32)  # pieces of all words
        self._ends = np.empty(0, np.int64)  # where each word ends in _ids

    def encode(self, text: Array, ends: Array) -> Pieces:
        """The pieces of the sentences of `text` (UTF-8 bytes) that end at `ends`."""
        if self._table.num_bytes > TABLE_BYTES:
            self._forget()
        numbers, word_ends = self._table.number(text, ends)
        self._learn()
        return Pieces(*_spell(numbers, word_ends, self._ids, self._ends))

    def _learn(self) -> None:
        """Has the new words of the table cut into pieces."""
        new = self._table.words(first=len(self._ends))
        encodings = self._pipeline.encode_batch_fast(new, add_special_tokens=False)
        ids = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        if ids:
            last = self._ends[-1] if len(self._ends) else 0
            self._ids = np.concatenate([self._ids, *ids])
            self._ends = np.concatenate([self._ends, last + np.cumsum([len(word) for word in ids])])


@compiled
def _spell(numbers, word_ends, ids, ends):
    """Puts the pieces of each word in its place."""
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
