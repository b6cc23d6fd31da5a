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
        """Concatenates arrays, at least one."""
        return cls(np.concatenate(rows), np.cumsum([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def from_table(cls, values: Array) -> Ragged:
        """Makes rows of a table (rows, length)."""
        rows, length = values.shape
        return cls(values.reshape(-1), length * np.arange(1, rows + 1, dtype=np.int64))

    @classmethod
    def join(cls, parts: Iterable[Ragged]) -> Ragged:
        """Concatenates the rows of several, at least one."""
        parts = list(parts)
        before = np.cumsum([0, *(len(part.values) for part in parts)])
        ends = [part.ends + offset for part, offset in zip(parts, before, strict=False)]
        return cls(np.concatenate([part.values for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Array:
        return np.asarray(self.ends - self.lengths)

    @property
    def lengths(self) -> Array:
        return np.asarray(np.diff(self.ends, prepend=0))

    def row(self, number: int) -> Array:
        return self.values[self.ends[number - 1] if number else 0 : self.ends[number]]

    def take(self, numbers: Array) -> Ragged:
        """Returns these rows, in this order."""
        return self.take_stretches(numbers, 0, self.lengths[numbers])

    def take_stretches(self, numbers: Array, begins: Array | int, ends: Array) -> Ragged:
        """Returns a slice of each of these rows, from `begins` up to `ends`."""
        lengths = ends - begins
        return Ragged(self.values[ranges(self.starts[numbers] + begins, lengths)], np.cumsum(lengths))
