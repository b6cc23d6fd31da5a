"""Sentences whose words get a tag each, as items: divided where they are too long, with what stands around them."""

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
    """Where every sentence ends among the words."""
    document_ends: Array
    """Where every document ends among the words."""
    tags: Array | None = None
    """The number of the tag of every word."""


class Windows(NamedTuple):
    """Which of the words every item tags, and which it sees."""

    first_tagged: Array
    end_tagged: Array
    first: Array
    end: Array


class TaggedWords(Items):
    """Sentences as items, or parts of those that are too long, so that every word is tagged in exactly one item."""

    def __init__(self, words: Words, cutter: Cutter, length: int, document_context: bool) -> None:
        self.words = words
        self._cutter, self._length = cutter, length
        self._context_ends = words.document_ends if document_context else words.sentence_ends

    def __len__(self) -> int:
        return len(self._windows.first)

    def encode(self, numbers: Array) -> Encoded:
        """Lays out windows of words; those around the tagged ones are only seen."""
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
        """The pieces of the sequences that these sentences would make as a whole, without their neighbours."""
        ends = self._before[self.words.sentence_ends]
        lengths: Array = 2 + np.diff(ends, prepend=0)[numbers]
        return lengths

    @cached_property
    def _pieces(self) -> Ragged:
        """The pieces of every word: at least one, at most as many as a window has room for."""
        cut = self._cutter.cut_texts(self.words.texts)
        kept = cut.take_stretches(np.arange(len(cut)), 0, np.minimum(cut.lengths, self._length - 2))
        values = np.insert(kept.values, kept.starts[kept.lengths == 0], self._cutter.special.unk)
        return Ragged(values, np.cumsum(np.maximum(kept.lengths, 1)))

    @cached_property
    def _before(self) -> Array:
        """How many pieces there are before every word, and in all."""
        return np.concatenate([[0], self._pieces.ends])

    @cached_property
    def _windows(self) -> Windows:
        """Which words every item tags, and which it sees: as many pieces before those as after them."""
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
        """Divides sentences that are longer than a window into parts of half of one, so that each has a context."""
        before, starts = self._before, np.concatenate([[0], ends])[:-1]
        cuts = []
        for sentence in np.flatnonzero(before[ends] - before[starts] > room):
            at = starts[sentence]
            while at < ends[sentence]:
                cuts.append(at)
                at = max(at + 1, np.searchsorted(before, before[at] + room // 2, "right") - 1)
        first = np.union1d(starts[starts < ends], np.array(cuts, np.int64))
        return first, np.append(first, ends[-1:])[1:]
