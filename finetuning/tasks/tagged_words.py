"""Sentences to tag as items: long ones are divided, and neighbouring words fill the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array, ranges
from finetuning.inputs import Cutter, Encoded, Items
from finetuning.ragged import Ragged


@dataclass(frozen=True)
class Words:
    """The words of a split, one after another."""

    texts: list[str]
    sentence_ends: Array
    """The end of each sentence among the words."""
    document_ends: Array
    """The end of each document among the words."""
    tags: Array | None = None
    """The tag of every word, as a number."""


class Windows(NamedTuple):
    """The words that each item tags, and those that it sees."""

    first_tagged: Array
    end_tagged: Array
    first: Array
    end: Array


class TaggedWords(Items):
    """Sentences, or parts of long ones, as items; every word is tagged in exactly one."""

    def __init__(self, words: Words, cutter: Cutter, length: int, document_context: bool) -> None:
        self.words = words
        self._cutter, self._length = cutter, length
        self._context_ends = words.document_ends if document_context else words.sentence_ends

    def __len__(self) -> int:
        return len(self._windows.first)

    def encode(self, numbers: Array) -> Encoded:
        """Lays out windows of words; words around the tagged ones are context."""
        window, before = Windows(*(each[numbers] for each in self._windows)), self._before
        pieces = self._pieces.take(ranges(window.first, window.end - window.first)).values
        ends = np.cumsum(before[window.end] - before[window.first])
        counts = window.end_tagged - window.first_tagged
        tagged = ranges(window.first_tagged, counts)
        places, ends_tagged = 1 + before[tagged] - np.repeat(before[window.first], counts), np.cumsum(counts)
        labels = None if self.words.tags is None else Ragged(self.words.tags[tagged], ends_tagged)
        sequences = self._cutter.lay_out(Ragged(pieces, ends), None, self._length)
        return Encoded(sequences, labels, Ragged(places, ends_tagged))

    def measure_whole(self, numbers: Array) -> Array:
        """Returns the pieces of these sentences' sequences undivided, without context."""
        ends = self._before[self.words.sentence_ends]
        return np.asarray(2 + np.diff(ends, prepend=0)[numbers])

    @cached_property
    def _pieces(self) -> Ragged:
        """The pieces of every word: at least one, at most a window."""
        cut = self._cutter.cut_words(self.words.texts)
        kept = cut.take_stretches(np.arange(len(cut)), 0, np.minimum(cut.lengths, self._length - 2))
        values = np.insert(kept.values, kept.starts[kept.lengths == 0], self._cutter.special.unk)
        return Ragged(values, np.cumsum(np.maximum(kept.lengths, 1)))

    @cached_property
    def _before(self) -> Array:
        """The number of pieces before every word, and in total."""
        return np.concatenate([[0], self._pieces.ends])

    @cached_property
    def _windows(self) -> Windows:
        """The words that each item tags and sees, with equal context before and after where possible."""
        before, ends, room = self._before, self._context_ends, self._length - 2
        first, end = self._divide(self.words.sentence_ends, room)
        context = np.searchsorted(ends, first, "right")
        pieces_left = before[first] - before[np.concatenate([[0], ends])[context]]
        pieces_right = before[ends[context]] - before[end]
        spare = room - (before[end] - before[first])
        left = np.minimum(pieces_left, np.maximum(spare // 2, spare - pieces_right))
        right = np.minimum(pieces_right, spare - left)
        return Windows(
            first,
            end,
            np.searchsorted(before, before[first] - left, "left"),
            np.searchsorted(before, before[end] + right, "right") - 1,
        )

    def _divide(self, ends: Array, room: int) -> tuple[Array, Array]:
        """Divides sentences longer than a window into parts of half a window, so that each has context."""
        before, starts = self._before, np.concatenate([[0], ends])[:-1]
        cuts = []
        for sentence in np.flatnonzero(before[ends] - before[starts] > room):
            at = starts[sentence]
            while at < ends[sentence]:
                cuts.append(at)
                at = max(at + 1, np.searchsorted(before, before[at] + room // 2, "right") - 1)
        first = np.union1d(starts[starts < ends], np.array(cuts, np.int64))
        return first, np.append(first, ends[-1:])[1:]
