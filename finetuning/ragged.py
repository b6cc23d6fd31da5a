"""Rows of different lengths in one array, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.common.arrays import Array, ranges


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, one after another."""

    values: Array  # (n, …)
    ends: Array  # (rows,) int64: where every row ends in `values`

    @classmethod
    def from_rows(cls, rows: Sequence[Array]) -> Ragged:
        """Puts arrays, at least one, one after another."""
        return cls(np.concatenate(rows), np.cumsum([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def from_table(cls, values: Array) -> Ragged:
        """Rows of the same length, as a table (rows, length) has them."""
        rows, length = values.shape
        return cls(values.reshape(-1), length * np.arange(1, rows + 1, dtype=np.int64))

    @classmethod
    def join(cls, parts: Iterable[Ragged]) -> Ragged:
        """The rows of several, at least one, after one another."""
        parts = list(parts)
        before = np.cumsum([0, *(len(part.values) for part in parts)])
        ends = [part.ends + offset for part, offset in zip(parts, before, strict=False)]
        return cls(np.concatenate([part.values for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Array:
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)[: len(self.ends)]

    @property
    def lengths(self) -> Array:
        lengths: Array = self.ends.copy()
        lengths[1:] -= self.ends[:-1]
        return lengths

    def row(self, number: int) -> Array:
        return self.values[self.ends[number - 1] if number else 0 : self.ends[number]]

    def take(self, numbers: Array) -> Ragged:
        """These rows, in this order."""
        return self.take_stretches(numbers, 0, self.lengths[numbers])

    def take_stretches(self, numbers: Array, begins: Array | int, ends: Array) -> Ragged:
        """Stretches of these rows, from a place in each up to another."""
        lengths = ends - begins
        return Ragged(self.values[ranges(self.starts[numbers] + begins, lengths)], np.cumsum(lengths))
