"""Cuts sentences into WordPiece ids equal to those of transformers' BertTokenizerFast, several times as fast.

The module words.py says how that is exact and why it is fast. A distinct word in ASCII, which that module has
normalised already, is cut here by WordPiece's own rule: the longest piece that the rest of the word begins with, again
and again. The other words, which are few, are cut so once `tokenizers` has normalised them (splitting.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.vocabulary.encoders.keys import SHORT, find, look_up, make_short_key, make_table
from data_prep.vocabulary.encoders.splitting import LONGEST_WORD, WordSplitter, cut_long_parts
from data_prep.vocabulary.encoders.tables import CutWords, TableEncoder
from data_prep.vocabulary.encoders.words import WordTable, spell_out

HASH = ord("#")  # a piece that goes on with a word begins with two of them


class PieceTable(NamedTuple):
    """The pieces of a vocabulary, found by their letters in compiled code."""

    slots: Array  # of keys.py; numbers are ids
    letters: Array  # all pieces, one after another
    ends: Array  # (pieces,) where every piece ends in letters
    longest: int  # bytes of the longest piece
    unknown: int  # the id of [UNK]

    @classmethod
    def from_tokenizer(cls, pipeline: Tokenizer) -> PieceTable:
        """Makes the table from what `tokenizers` knows of the vocabulary."""
        ids = pipeline.get_vocab(with_added_tokens=False)
        pieces = [piece.encode() for piece in sorted(ids, key=ids.__getitem__)]
        assert list(range(len(pieces))) == sorted(ids.values())
        sizes = np.array([len(piece) for piece in pieces])
        letters, ends = np.frombuffer(b"".join(pieces), np.uint8).copy(), np.cumsum(sizes)
        slots = make_table(letters, ends, 1 << (4 * len(pieces)).bit_length())
        return cls(slots, letters, ends, int(sizes.max()), ids[pipeline.model.unk_token])


class FastWordPiece(TableEncoder):
    """Encodes sentences as `tokenizers` would, but for long words, looking at every distinct word once."""

    def __init__(self, pipeline: Tokenizer, cased: bool) -> None:
        self._splitter = WordSplitter(pipeline.normalizer, pipeline.pre_tokenizer)
        self._table = PieceTable.from_tokenizer(pipeline)
        super().__init__(partial(WordTable, cased))

    def cut_words(self, letters: Array, ends: Array) -> CutWords:
        """Cuts words into pieces; the foreign ones are split first."""
        ids, stops, sizes = _cut_words(letters, ends, False, *self._table)
        starts = np.concatenate([[0], stops[:-1]])
        foreign = np.flatnonzero(starts == stops)
        more = self._cut_foreign(spell_out(letters, ends, foreign), len(ids))
        starts[foreign], stops[foreign], sizes[foreign] = more.starts, more.stops, more.sizes
        return CutWords(np.concatenate([ids, more.ids]), starts, stops, sizes)

    def _cut_foreign(self, words: Sequence[str], first: int) -> CutWords:
        """Cuts words that are not ASCII; their pieces are counted from `first` on."""
        parts = cut_long_parts(self._splitter.split(words))
        ids, stops, sizes = _cut_words(parts.letters, parts.ends, True, *self._table)
        bounds = first + np.concatenate([[0], stops])
        last = np.cumsum(parts.counts)
        totals = np.concatenate([[[0, 0]], np.cumsum(sizes, axis=0)])
        begin = last - parts.counts
        return CutWords(ids, bounds[begin], bounds[last], totals[last] - totals[begin])


@compiled
def _cut_words(letters, ends, normal, slots, piece_letters, piece_ends, longest, unknown):
    """Cuts words into pieces; returns these, where those of every word end, and its sizes as CutWords has them.

    A word that is not ASCII gets none, unless the words are normal: `tokenizers` has to normalise it first.
    """
    ids, stops = np.empty(letters.size, np.int32), np.empty(ends.size, np.int64)
    sizes = np.zeros((ends.size, 2), np.int64)
    piece = np.empty((longest >> 3) + 2, np.uint64)
    count, start = 0, 0
    for number in range(ends.size):
        word = letters[start : ends[number]]
        characters, before = _count_characters(word), count
        if characters > LONGEST_WORD and (normal or characters == word.size):
            ids[count] = unknown
            count += 1
        elif normal or characters == word.size:
            count = _cut_word(word, piece, slots, piece_letters, piece_ends, longest, unknown, ids, count)
        if count > before:
            sizes[number, 0] = characters
            sizes[number, 1] = characters if ids[before] == unknown else 0
        stops[number] = count
        start = ends[number]
    return ids[:count].copy(), stops, sizes


@compiled
def _count_characters(word):
    """Counts the characters of a word, of which each has one byte that goes on with none before."""
    count = 0
    for letter in word:
        count += letter & 0xC0 != 0x80
    return count


@compiled
def _cut_word(word, piece, slots, piece_letters, piece_ends, longest, unknown, ids, first):
    """Writes the pieces of a word into ids[first:], or [UNK] if it has none; returns where they end."""
    at, count, marks = 0, first, 0
    while at < word.size:
        size = min(longest, marks + word.size - at)
        piece_bytes = piece.view(np.uint8)
        piece_bytes[:marks] = HASH
        copy_items(piece_bytes, marks, word, at, at + size - marks)
        found, size = _find_longest_piece(piece, marks, size, slots, piece_letters, piece_ends)
        if found < 0:
            ids[first] = unknown
            return first + 1
        ids[count] = found
        count += 1
        at += size - marks
        marks = 2
    return count


@compiled
def _find_longest_piece(piece, marks, size, slots, letters, ends):
    """Finds the longest piece that the first `size` letters of `piece` begin with, and that is more than marks.

    Returns its id and its size; an id of -1 if there is none.
    """
    while size > SHORT:
        slot = look_up(piece, size, slots, letters, ends)
        if slots[slot].high:
            return slots[slot].number, size
        size -= 1
    while size > marks:
        slot = find(slots, *make_short_key(piece[0], piece[1], size))
        if slots[slot].high:
            return slots[slot].number, size
        size -= 1
    return -1, size
