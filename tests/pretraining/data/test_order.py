"""The order of examples: bijections, and the same for every way of slicing it."""

import math
from collections.abc import Iterator
from itertools import count, islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.common.hashing import hash_key
from pretraining.data.order import BatchOrder, Examples, Order, permute

BITS_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SHARD_ROWS = ((7, 0, 12, 1), (9, 4), (30,))  # duplicates of different sizes, and a shard without rows

seeds = st.integers(0, BITS_64)


def slow_mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & BITS_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & BITS_64
    return value ^ (value >> 31)


def slow_fold(*parts: int) -> int:
    key = 0
    for part in parts:
        key = slow_mix((key ^ part) + GOLDEN & BITS_64)
    return key


def slow_permute(index: int, size: int, key: int) -> int:
    """One index at a time, in Python's own integers."""
    rows = math.ceil(math.sqrt(size))
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for number in range(4):
            hashed = slow_mix((column ^ key) + GOLDEN * (2 * number + 1) & BITS_64)
            row = (row + ((hashed >> 32) * rows >> 32)) % rows
            hashed = slow_mix((row ^ key) + GOLDEN * (2 * number + 2) & BITS_64)
            column = (column + ((hashed >> 32) * columns >> 32)) % columns
        index = row * columns + column
        if index < size:
            return index


def slow_examples(seed: int, shard_rows: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int, int]]:
    """Example after example, epoch after epoch."""
    for epoch in count():
        duplicate = epoch % len(shard_rows)
        rows = shard_rows[duplicate]
        for turn in range(len(rows)):
            shard = slow_permute(turn, len(rows), slow_fold(seed, epoch, 0))
            for index in range(rows[shard]):
                yield duplicate, shard, slow_permute(index, rows[shard], slow_fold(seed, epoch, 1, shard))


def triples(examples: Examples) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in examples), strict=True))


def test_every_small_set_is_permuted() -> None:
    for size in (*range(1, 150), *range(150, 400, 7)):
        permuted = permute(np.arange(size), size, hash_key(size, 5))
        assert np.array_equal(np.sort(permuted), np.arange(size))


@settings(max_examples=30)
@given(size=st.integers(1, 1 << 40), seed=seeds, start=st.floats(0, 1))
def test_indices_of_large_sets_stay_apart_and_inside(size: int, seed: int, start: float) -> None:
    first = int(start * max(0, size - 2000))
    indices = np.arange(first, min(first + 2000, size))
    permuted = permute(indices, size, hash_key(seed))
    assert len(np.unique(permuted)) == len(indices)
    assert permuted.min() >= 0
    assert permuted.max() < size


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=20), seed=seeds)
def test_sets_of_many_sizes_at_once_are_as_one_by_one(sizes: list[int], seed: int) -> None:
    indices = np.array([seed % size for size in sizes])
    permuted = permute(indices, np.array(sizes), hash_key(seed, np.arange(len(sizes))))
    numbers = zip(range(len(sizes)), indices.tolist(), sizes, strict=True)
    assert permuted.tolist() == [slow_permute(index, size, slow_fold(seed, number)) for number, index, size in numbers]


def test_neighbouring_keys_have_nothing_in_common() -> None:
    """Two random permutations agree in one place on average, and neighbours stay so once."""
    size, keys = 1000, [hash_key(seed, epoch) for seed in range(10) for epoch in range(10)]
    permuted = np.stack([permute(np.arange(size), size, key) for key in keys])
    agreements = (permuted[1:] == permuted[:-1]).sum()
    assert 60 < agreements < 140  # 99 expected
    neighbours = (np.diff(permuted, axis=1) == 1).sum()
    assert 60 < neighbours < 140
    correlations = np.corrcoef(permuted)[np.triu_indices(len(keys), 1)]
    assert abs(correlations).max() < 5 / math.sqrt(size)


@settings(max_examples=30)
@given(seed=seeds, start=st.integers(0, 400), size=st.integers(1, 200))
def test_examples_are_those_of_the_slow_reference(seed: int, start: int, size: int) -> None:
    expected = list(islice(slow_examples(seed, SHARD_ROWS), start, start + size))
    assert triples(Order(seed, SHARD_ROWS).examples(start, size)) == expected


def test_epochs_are_counted() -> None:
    order = Order(0, SHARD_ROWS)
    assert [order.epoch_start(epoch) for epoch in range(5)] == [0, 20, 33, 63, 83]
    assert [order.find_epoch(index) for index in (0, 19, 20, 32, 33, 62, 63, 82, 83)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_far_away_and_large_is_as_near() -> None:
    """A step late in a long run on a huge corpus needs nothing but itself."""
    order = Order(0, ((1 << 34,) * 3,))
    examples = order.examples(5 * 3 * (1 << 34) - 10, 20)
    assert set(examples.duplicate) == {0}
    assert examples.row.max() > 1 << 30
    assert len(set(triples(examples))) == 20


def test_the_order_never_changes_between_versions() -> None:
    """A run that was begun with an earlier version goes on with the same examples."""
    found = Order(12345, ((1000, 1200), (900,))).examples(2195, 10)
    assert (found.duplicate.tolist(), found.shard.tolist()) == ([0] * 5 + [1] * 5, [1] * 5 + [0] * 5)
    assert found.row.tolist() == [523, 404, 968, 1170, 923, 501, 340, 449, 261, 106]


@given(st.sets(st.integers(0, 40)))
def test_steps_take_the_batches_that_are_not_left_out(left_out: set[int]) -> None:
    order = BatchOrder(Order(0, ((5,),)), 1, left_out)
    wanted = islice((number for number in count() if number not in left_out), 60)
    assert [order.number(step) for step in range(60)] == list(wanted)
