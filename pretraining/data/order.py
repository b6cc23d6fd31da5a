"""The order in which a run reads its examples: a pure function of (seed, epoch, index), with nothing materialised.

Epoch e reads duplicate e mod n. In an epoch the shards follow one another in an order of its own, and so do the rows
of each shard. Shards are shuffled over the whole corpus already, so reading shard after shard is as random as any
other order, and it keeps the reads local. Ranks take no part in this: they only slice what comes out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.hashing import BITS_64, GOLDEN, hash_key, scramble_bits

ROUNDS = 4
DRAWN = BITS_64
"""A part of keys where the order has the number of an epoch, which never is so large."""
LARGEST = 1 << 40
"""The most indices that are permuted: the halves of an index stay far below 2³², as `_below` needs."""


def permute(index: Array, size: int | Array, key: Array) -> Array:
    """Where each index goes in the permutation of 0 … size-1 that its key names; size at most 2⁴⁰.

    A Feistel network: the index is a place in a table that is about square, row and column are shifted in turn by
    hashes of each other. The table is hardly larger than `size`; what falls outside goes through it again.
    """
    place = index.astype(np.uint64)
    sizes = np.broadcast_to(np.asarray(size, np.uint64), place.shape)
    keys = np.broadcast_to(key, place.shape)
    rows = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    columns = (sizes + rows - np.uint64(1)) // rows
    place = _shift(place, rows, columns, keys)
    outside = np.flatnonzero(place >= sizes)
    while outside.size:
        again = _shift(place[outside], rows[outside], columns[outside], keys[outside])
        place[outside] = again
        outside = outside[again >= sizes[outside]]
    return place.astype(np.int64)


def _shift(place: Array, rows: Array, columns: Array, keys: Array) -> Array:
    row, column = np.divmod(place, columns)
    for number in range(ROUNDS):
        row = _add(row, _below(rows, column ^ keys, 2 * number), rows)
        column = _add(column, _below(columns, row ^ keys, 2 * number + 1), columns)
    shifted: Array = row * columns + column
    return shifted


def _below(limits: Array, words: Array, number: int) -> Array:
    """A hash of each word, below its limit."""
    hashes = scramble_bits(words + np.uint64(GOLDEN * (number + 1) & BITS_64))
    below: Array = ((hashes >> np.uint64(32)) * limits) >> np.uint64(32)
    return below


def _add(values: Array, others: Array, limits: Array) -> Array:
    """The sum of what is below a limit, modulo the limit."""
    sums: Array = values + others
    sums -= limits * (sums >= limits)
    return sums


class Examples(NamedTuple):
    """Where examples are: arrays of the same length."""

    duplicate: Array
    shard: Array
    """number of the shard in its duplicate"""
    row: Array

    def take(self, chosen: Array | slice) -> Examples:
        """Some of them."""
        return Examples(self.duplicate[chosen], self.shard[chosen], self.row[chosen])

    @classmethod
    def join(cls, parts: Sequence[Examples]) -> Examples:
        """All of them, one after another."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Order:
    """The order of all examples of a phase, epoch after epoch without end."""

    def __init__(self, seed: int, shard_rows: tuple[tuple[int, ...], ...]) -> None:
        """`shard_rows` are the numbers of rows of each duplicate's shards."""
        self.seed = seed
        self.rows = [np.array(rows, np.int64) for rows in shard_rows]
        self.sizes = [int(rows.sum()) for rows in self.rows]
        assert self.sizes, "no duplicate"
        assert all(0 < size <= LARGEST for size in self.sizes), f"examples of the duplicates: {self.sizes}"
        self._shards = lru_cache(maxsize=2)(self._permute_shards)  # a batch may lie across two epochs

    def num_examples(self, epoch: int) -> int:
        """How many examples an epoch has; duplicates may differ."""
        return self.sizes[epoch % len(self.sizes)]

    def epoch_start(self, epoch: int) -> int:
        """The index of an epoch's first example."""
        cycles, rest = divmod(epoch, len(self.sizes))
        return cycles * sum(self.sizes) + sum(self.sizes[:rest])

    def find_epoch(self, index: int) -> int:
        """The epoch that an example belongs to."""
        cycles, rest = divmod(index, sum(self.sizes))
        ends = np.cumsum(self.sizes)
        return cycles * len(self.sizes) + int(np.searchsorted(ends, rest, side="right"))

    def epochs(self, examples: int) -> float:
        """How many epochs the first so many examples are."""
        epoch = self.find_epoch(examples)
        return epoch + (examples - self.epoch_start(epoch)) / self.num_examples(epoch)

    def examples(self, start: int, count: int) -> Examples:
        """The examples with the indices start … start+count-1."""
        parts = []
        for epoch in range(self.find_epoch(start), self.find_epoch(start + count - 1) + 1):
            begin = self.epoch_start(epoch)
            end = begin + self.num_examples(epoch)
            parts.append(self._examples(epoch, max(start, begin) - begin, min(start + count, end) - begin))
        return Examples.join(parts)

    def _examples(self, epoch: int, start: int, stop: int) -> Examples:
        """Examples of one epoch."""
        duplicate = epoch % len(self.sizes)
        shards, ends = self._shards(epoch)
        indices = np.arange(start, stop)
        turn = np.searchsorted(ends, indices, side="right")
        shard = shards[turn]
        rows = self.rows[duplicate][shard]
        row = permute(indices - ends[turn] + rows, rows, hash_key(self.seed, epoch, 1, shard))
        return Examples(np.full(len(row), duplicate), shard, row)

    def _permute_shards(self, epoch: int) -> tuple[Array, Array]:
        """The shards in the order of an epoch, and where each ends."""
        rows = self.rows[epoch % len(self.rows)]
        shards = permute(np.arange(len(rows)), len(rows), hash_key(self.seed, epoch, 0))
        return shards, np.cumsum(rows[shards])


class BatchOrder:
    """The global batches of a phase, one for each step. Batches that are left out are not in it."""

    def __init__(
        self, order: Order, batch_size: int, left_out: Collection[int] = (), behind: int = 0, total: int | None = None
    ) -> None:
        """`left_out` has the numbers of batches, counted as if none were left out; `behind` are the steps of the run
        before this phase, and `total` those of all phases, None where nobody knows."""
        self.batch_size = batch_size
        self._order, self._left_out = order, sorted(left_out)
        self._behind, self._total = behind, total

    def number(self, step: int) -> int:
        """Which batch a step of the phase takes, counted as if none were left out."""
        number = step
        for left_out in self._left_out:
            if number >= left_out:
                number += 1
        return number

    def examples(self, step: int) -> Examples:
        """The examples of a step's batch."""
        return self._order.examples(self.number(step) * self.batch_size, self.batch_size)

    def keys(self, step: int) -> Array:
        """Numbers for what is drawn for these examples: others in every epoch, since their indices are others."""
        start = self.number(step) * self.batch_size
        return hash_key(self._order.seed, DRAWN, np.arange(start, start + self.batch_size))

    def share_done(self, step: int) -> float:
        """The share of the run's steps that lies behind a step: 0 at its first and 1 at its last."""
        return 0.0 if self._total is None else (self._behind + step) / max(self._total - 1, 1)
