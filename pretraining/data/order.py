"""The order in which a run reads its examples: a pure function of (seed, epoch, index); no permutation is stored.

Epoch e reads duplicate e mod n. Every epoch permutes the shards, and the rows of each shard. The shards are shuffled
over the whole corpus already, so reading shard after shard is as random as any other order, and keeps the reads local.
The order does not depend on ranks: they only take slices of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.hashing import BITS_64, GOLDEN, hash_key, scramble_bits

ROUNDS = 4
DRAWN = BITS_64
"""Takes the place of the epoch in keys of random draws; no epoch has such a large number."""
LARGEST = 1 << 40
"""The most indices that can be permuted: `_hash_below` needs the halves of an index to be far below 2³²."""


def permute(index: Array, size: int | Array, key: Array) -> Array:
    """Permutes indices in 0 … size-1 by the permutation of a key; size is at most 2⁴⁰.

    A Feistel network: the index is a place in a table that is about square, and row and column are shifted in turn by
    hashes of each other. The table is hardly larger than `size`; a result outside goes through it again.
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
        row = _add(row, _hash_below(rows, column ^ keys, 2 * number), rows)
        column = _add(column, _hash_below(columns, row ^ keys, 2 * number + 1), columns)
    return row * columns + column


def _hash_below(limits: Array, words: Array, number: int) -> Array:
    """Hashes each word to a number below its limit."""
    hashes = scramble_bits(words + np.uint64(GOLDEN * (number + 1) & BITS_64))
    below: Array = ((hashes >> np.uint64(32)) * limits) >> np.uint64(32)
    return below


def _add(values: Array, others: Array, limits: Array) -> Array:
    """Adds numbers below a limit, modulo the limit."""
    sums: Array = values + others
    sums -= limits * (sums >= limits)
    return sums


class Examples(NamedTuple):
    """The places of examples, as arrays of the same length."""

    duplicate: Array
    """the number of the set in its dataset: that of the duplicate, where there is one corpus"""
    shard: Array
    """the number of the shard in its duplicate"""
    row: Array

    def take(self, chosen: Array | slice) -> Examples:
        """Takes some of the examples."""
        return Examples(self.duplicate[chosen], self.shard[chosen], self.row[chosen])


class ShardPlaces(NamedTuple):
    """The places of examples before the rows of their shards are permuted, as arrays of the same length."""

    duplicate: Array
    shard: Array
    place: Array
    """index in the shard"""
    rows: Array
    """number of rows of the shard"""
    key: Array
    """key of the permutation of these rows"""


def permute_places(parts: Sequence[ShardPlaces]) -> Examples:
    """Permutes the rows of the shards of places, all at once: one call for many parts."""
    places = ShardPlaces(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return Examples(places.duplicate, places.shard, permute(places.place, places.rows, places.key))


class Order:
    """The order of all examples of a phase, epoch after epoch without end."""

    def __init__(self, seed: int, shard_rows: tuple[tuple[int, ...], ...]) -> None:
        """`shard_rows` has the number of rows of each shard, by duplicate."""
        self.seed = seed
        self.rows = [np.array(rows, np.int64) for rows in shard_rows]
        self.sizes = [int(rows.sum()) for rows in self.rows]
        assert self.sizes, "no duplicate"
        assert all(0 < size <= LARGEST for size in self.sizes), f"examples of the duplicates: {self.sizes}"
        self._starts: list[int] = [0, *np.cumsum(self.sizes).tolist()]
        self._shards = lru_cache(maxsize=2)(self._permute_shards)  # a batch may be in two epochs

    def epoch_start(self, epoch: int) -> int:
        """Returns the index of an epoch's first example."""
        cycles, rest = divmod(epoch, len(self.sizes))
        return cycles * self._starts[-1] + self._starts[rest]

    def find_epoch(self, index: int) -> int:
        """Finds the epoch of an example."""
        cycles, rest = divmod(index, self._starts[-1])
        return cycles * len(self.sizes) + bisect_right(self._starts, rest) - 1

    def examples(self, start: int, count: int) -> Examples:
        """Returns the examples with the indices start … start+count-1."""
        return permute_places(self.find_places(start, count))

    def find_places(self, start: int, count: int) -> list[ShardPlaces]:
        """Finds the places of the examples with the indices start … start+count-1, epoch by epoch."""
        parts = []
        for epoch in range(self.find_epoch(start), self.find_epoch(start + count - 1) + 1):
            begin, end = self.epoch_start(epoch), self.epoch_start(epoch + 1)
            parts.append(self._find_places(epoch, max(start, begin) - begin, min(start + count, end) - begin))
        return parts

    def _find_places(self, epoch: int, start: int, stop: int) -> ShardPlaces:
        """Finds the places of examples of one epoch."""
        duplicate = epoch % len(self.sizes)
        shards, ends, keys = self._shards(epoch)
        indices = np.arange(start, stop)
        turn = ends.searchsorted(indices, side="right")
        shard = shards[turn]
        rows = self.rows[duplicate][shard]
        return ShardPlaces(np.full(stop - start, duplicate), shard, indices - ends[turn] + rows, rows, keys[turn])

    def _permute_shards(self, epoch: int) -> tuple[Array, Array, Array]:
        """Returns the shards in the order of an epoch, where each ends, and the keys of their rows."""
        rows = self.rows[epoch % len(self.rows)]
        shards = permute(np.arange(len(rows)), len(rows), hash_key(self.seed, epoch, 0))
        return shards, np.cumsum(rows[shards]), hash_key(self.seed, epoch, 1, shards)


class ExampleOrder(Protocol):
    """The order of the examples of a phase."""

    seed: int

    def examples(self, start: int, count: int, /) -> Examples:
        """Returns the examples with the indices start … start+count-1."""


class BatchOrder:
    """The global batches of a phase, one for each step, without those that are left out."""

    def __init__(
        self, order: ExampleOrder, batch_size: int, skipped: Iterable[int] = (), past: int = 0, total: int | None = None
    ) -> None:
        """`skipped` has numbers of batches, counted as if none were left out; `past` is the number of steps before this
        phase with its objective, and `total` that of all phases with it, None where it is not known."""
        self.batch_size = batch_size
        self._order, self._skipped, self._past, self._total = order, sorted(skipped), past, total

    def number(self, step: int) -> int:
        """Returns the number of a step's batch, counted as if none were left out."""
        number = step
        for skipped in self._skipped:
            if number >= skipped:
                number += 1
        return number

    def examples(self, step: int) -> Examples:
        """Returns the examples of a step's batch."""
        return self._order.examples(self.number(step) * self.batch_size, self.batch_size)

    def keys(self, step: int) -> Array:
        """Returns the random keys of a step's examples; an example has another key in every epoch."""
        start = self.number(step) * self.batch_size
        return hash_key(self._order.seed, DRAWN, np.arange(start, start + self.batch_size))

    def share_done(self, step: int) -> float:
        """Returns the share of the run that is done at a step: 0 at the first and 1 at the last."""
        return 0.0 if self._total is None else (self._past + step) / max(self._total - 1, 1)
