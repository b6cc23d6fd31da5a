"""Examples as flat arrays, one after another; and examples cut out of longer ones.

    [CLS] A A A A A A [SEP] B B B B [SEP]   ->   [CLS] A A A [SEP] B B B [SEP]

The place where A ends and B begins stays, which next-sentence prediction needs, with the masks around it. A and B keep
half of the room each, or one of them more if the other is shorter. An example without B keeps its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from data_prep.common.arrays import Array, ranges


@dataclass(frozen=True)
class Rows:
    """Examples as the shards have them: s sequences, n pieces, m predictions, one sequence after another."""

    where: Array  # (s, 2) the number of the shard in the dataset, and the row
    lengths: Array  # (s,)
    pieces: Array  # (n,)
    boundaries: Array  # (s,) where B begins
    random_next: Array  # (s,)
    predictions: Array  # (s,) how many
    positions: Array  # (m,) in their sequence
    labels: Array  # (m,)

    @classmethod
    def from_memory(
        cls, lengths: Array, pieces: Array, boundaries: Array, predictions: Array, positions: Array, labels: Array
    ) -> Rows:
        """Makes examples that are in no shard, all in one dataset, whose B follows A."""
        zeros = np.zeros(len(lengths), np.int64)
        where = np.stack([zeros, np.arange(len(lengths))], axis=1)
        return cls(where, lengths, pieces, boundaries, zeros, predictions, positions, labels)

    @property
    def starts(self) -> Array:
        """The start of each sequence, (s,)."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def masked(self) -> Array:
        """The places of the masks among all pieces, (m,)."""
        return np.repeat(self.starts, self.predictions) + self.positions

    def restore_text(self) -> Array:
        """Returns the pieces of the text without masks, (n,)."""
        pieces = self.pieces.copy()
        pieces[self.masked] = self.labels
        return pieces

    def repeat(self) -> Rows:
        """Returns the examples twice, one time after the other."""
        return Rows(*(np.concatenate([each, each]) for each in vars(self).values()))

    def shorten(self, limit: int) -> Rows:
        """Shortens the examples to at most `limit` pieces."""
        window = Window.choose(self.lengths, self.boundaries, limit)
        places = ranges(np.zeros_like(self.lengths), self.lengths)
        marks = (places == 0) | (places == np.repeat(self.lengths - 1, self.lengths))  # [CLS] and the last [SEP]
        left = window.holds(self.positions, self.predictions)
        return replace(
            self,
            lengths=window.lengths,
            pieces=self.pieces[marks | window.holds(places, self.lengths)],
            boundaries=np.minimum(self.boundaries - window.start + 1, window.lengths),
            predictions=window.count(self.positions, self.predictions),
            positions=(self.positions - np.repeat(window.start - 1, self.predictions))[left],
            labels=self.labels[left],
        )


@dataclass(frozen=True)
class Draw:
    """The inputs of an objective's random draws for s examples in a step of training, the same on any rank."""

    keys: Array  # (s,) uint64: the random key of each example in this epoch
    done: float  # the share of the run's steps that lies behind
    vocabulary: int  # pieces of the vocabulary
    mask_piece: int  # which of them is [MASK]
    separator: int  # which of them is [SEP]


@dataclass(frozen=True)
class Window:
    """The parts of s examples that stay when they are cut: [CLS], the pieces from `start` to `stop`, and the last
    [SEP]."""

    start: Array  # (s,)
    stop: Array  # (s,)

    @classmethod
    def choose(cls, lengths: Array, boundaries: Array, limit: int) -> Window:
        """Chooses the parts that stay within `limit` pieces, of examples of these lengths whose B begins at
        `boundaries`."""
        first, second = boundaries - 2, lengths - boundaries - 1  # the pieces of A and of B
        room = limit - 3
        of_first = np.minimum(first, np.maximum(room // 2, room - second))
        of_second = np.minimum(second, room - of_first)
        paired = boundaries < lengths
        start = np.where(paired, boundaries - 1 - of_first, 1)
        stop = np.where(paired, boundaries + of_second, np.minimum(lengths, limit) - 1)
        return cls(start, stop)

    @property
    def lengths(self) -> Array:
        """The lengths of the cut examples."""
        return self.stop - self.start + 2

    def holds(self, places: Array, counts: Array) -> Array:
        """Tells which of these places stay; every example has `counts` of them."""
        start, stop = (np.repeat(bound, counts) for bound in (self.start, self.stop))
        return (start <= places) & (places < stop)

    def count(self, places: Array, counts: Array) -> Array:
        """Counts the places that every example keeps."""
        before = np.append(0, np.cumsum(self.holds(places, counts)))
        ends = np.cumsum(counts)
        return before[ends] - before[ends - counts]
