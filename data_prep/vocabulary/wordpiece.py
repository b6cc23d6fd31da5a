"""Cuts sentences into WordPiece ids equal to those of transformers' BertTokenizerFast, several times as fast.

The module words.py says how that is exact and why it is fast. A distinct word in ASCII, which that module has
normalised already, is cut here by WordPiece's own rule: the longest piece that the rest of the word begins with, again
and again. The other words, which are few, `tokenizers` normalises and cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.vocabulary.vocabulary import LONGEST_WORD, UNK
from data_prep.vocabulary.words import WordTable, look_up, rehashed, spell_out

TABLE_BYTES = 64 << 20  # the table of words starts anew beyond this, so that memory stays bounded
HASH = ord("#")  # a piece that goes on with a word begins with two of them


@dataclass(frozen=True)
class Pieces:
    """The pieces of several sentences, one sentence after another."""

    ids: Array  # (pieces,) int32
    ends: Array  # (sentences,) where every sentence ends in ids


class PieceTable(NamedTuple):
    """The pieces of a vocabulary, found by their letters in compiled code."""

    slots: Array  # open addressing: hash -> id, or -1
    letters: Array  # all pieces, one after another
    ends: Array  # (pieces,) where every piece ends in letters
    longest: int  # bytes of the longest piece
    unknown: int  # the id of [UNK]

    @classmethod
    def of(cls, pipeline: Tokenizer) -> PieceTable:
        """Makes the table from what `tokenizers` knows of the vocabulary."""
        ids = pipeline.get_vocab(with_added_tokens=False)
        pieces = [piece.encode() for piece in sorted(ids, key=ids.__getitem__)]
        assert list(range(len(pieces))) == sorted(ids.values())
        sizes = np.array([len(piece) for piece in pieces])
        letters, ends = np.frombuffer(b"".join(pieces), np.uint8).copy(), np.cumsum(sizes)
        slots = rehashed(1 << (4 * len(pieces)).bit_length(), letters, ends, len(pieces))
        return cls(slots, letters, ends, int(sizes.max()), ids[UNK])


class FastWordPiece:
    """Encodes sentences with a pipeline of `tokenizers`, or as it would, looking at every distinct word once."""

    def __init__(self, pipeline: Tokenizer, cased: bool) -> None:
        self._pipeline, self._cased = pipeline, cased
        self._table = PieceTable.of(pipeline)
        self._forget()

    def _forget(self) -> None:
        """Begins with no words, so that memory stays bounded however many words a corpus has."""
        self._words = WordTable(self._cased)
        self._ids = np.empty(0, np.int32)  # pieces of all words
        self._starts = self._stops = np.empty(0, np.int64)  # where the pieces of every word are in _ids

    def encode(self, text: Array, ends: Array) -> Pieces:
        """Cuts the sentences of `text` into pieces; `text` is bytes of UTF-8, in which the sentences end at `ends`."""
        if self._words.num_bytes > TABLE_BYTES:
            self._forget()
        numbers, word_ends = self._words.number(text, ends)
        self._learn()
        return Pieces(*_spell(numbers, word_ends, self._ids, self._starts, self._stops))

    def encode_texts(self, texts: Sequence[str]) -> Pieces:
        """Cuts texts into pieces; halves of characters, which JSON can hold and UTF-8 cannot, become `?`."""
        encoded = [text.encode(errors="replace") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return self.encode(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def _learn(self) -> None:
        """Cuts the words that are new in the table into pieces, and keeps those; the pipeline cuts the foreign ones."""
        if len(self._words) == len(self._starts):
            return
        letters, ends = self._words.letters(first=len(self._starts))
        ids, starts, stops = _cut_words(letters, ends, *self._table)
        foreign = np.flatnonzero(starts == stops)
        texts = spell_out(letters, ends, foreign)
        cut = [encoding.ids for encoding in self._pipeline.encode_batch_fast(texts, add_special_tokens=False)]
        stops[foreign] = len(ids) + np.cumsum([len(word) for word in cut], dtype=np.int64)
        starts[foreign] = stops[foreign] - [len(word) for word in cut]
        added = np.array([piece for word in cut for piece in word], np.int32)
        before = len(self._ids)
        self._ids = np.concatenate([self._ids, ids, added])
        self._starts = np.concatenate([self._starts, before + starts])
        self._stops = np.concatenate([self._stops, before + stops])


@compiled
def _cut_words(letters, ends, slots, piece_letters, piece_ends, longest, unknown):
    """Cuts words into pieces; returns these, and where the pieces of every word are: nowhere if it is not ASCII."""
    ids = np.empty(letters.size, np.int32)
    starts, stops = np.empty(ends.size, np.int64), np.empty(ends.size, np.int64)
    piece = np.empty(longest + 2, np.uint8)
    count, start = 0, 0
    for word in range(ends.size):
        starts[word] = count
        foreign = False
        for at in range(start, ends[word]):
            foreign |= letters[at] >= 128
        if not foreign:
            count = _cut_word(
                letters[start : ends[word]], piece, slots, piece_letters, piece_ends, longest, unknown, ids, count
            )
        stops[word] = count
        start = ends[word]
    return ids[:count].copy(), starts, stops


@compiled
def _cut_word(word, piece, slots, piece_letters, piece_ends, longest, unknown, ids, first):
    """Writes the pieces of a word into ids[first:], or [UNK] if it has none; returns where they end."""
    at, count = 0, first
    while at < word.size <= LONGEST_WORD:
        marks = 2 if at else 0
        size = min(longest, word.size - at)
        piece[0] = piece[1] = HASH
        copy_items(piece, marks, word, at, at + size)
        slot = look_up(piece, marks + size, slots, piece_letters, piece_ends)
        while size and slots[slot] < 0:
            size -= 1
            slot = look_up(piece, marks + size, slots, piece_letters, piece_ends)
        if not size:
            break
        ids[count] = slots[slot]
        count += 1
        at += size
    if at == word.size:
        return count
    ids[first] = unknown
    return first + 1


@compiled
def _spell(numbers, word_ends, ids, starts, stops):
    """Puts the pieces of the words one after another; returns them, and where every sentence ends."""
    total = 0
    for word in numbers:
        total += stops[word] - starts[word]
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
    return pieces, piece_ends
