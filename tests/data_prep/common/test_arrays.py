"""Ranges of numbers beside a plain loop, and the hashes of 64-bit numbers: the same on every machine."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.common.arrays import ranges
from data_prep.common.compiled import compiled
from data_prep.common.hashing import hash_key, scramble_bits


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5))))
def test_ranges_follow_one_another(given_ranges: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(given_ranges, np.int64).reshape(-1, 2).T
    expected = [number for start, length in given_ranges for number in range(start, start + length)]
    assert ranges(starts, lengths).tolist() == expected


NUMBERS = st.integers(0, 2**64 - 1)
compiled_scramble = compiled(scramble_bits)


def test_bits_are_scrambled_as_in_splitmix64() -> None:
    """The generator SplitMix64 is published with its first numbers for the seed 1234567."""
    steps = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert scramble_bits(steps).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_are_those_by_which_runs_have_read_their_examples() -> None:
    """Other keys would change the order of the examples in the middle of a run."""
    assert hash_key(7, 3, 0).tolist() == [11248596980798508817]
    assert hash_key(7, 3, 1, np.arange(2)).tolist() == [11012453653248285810, 2826987509315806722]
    assert hash_key(-1).tolist() == hash_key(2**64 - 1).tolist()


@given(st.lists(NUMBERS, min_size=1, max_size=50, unique=True))
def test_no_two_numbers_are_scrambled_alike(numbers: list[int]) -> None:
    assert len(set(scramble_bits(np.array(numbers, np.uint64)).tolist())) == len(numbers)


@settings(deadline=None)  # the first one waits for the compiler
@given(NUMBERS)
def test_one_number_is_scrambled_by_compiled_code_as_many_are_by_numpy(number: int) -> None:
    assert int(compiled_scramble(np.uint64(number))) == int(scramble_bits(np.array([number], np.uint64))[0])


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.lists(NUMBERS, min_size=1, max_size=8))
def test_an_array_of_parts_gives_the_keys_of_its_numbers(parts: list[int], last: list[int]) -> None:
    keys = hash_key(*parts, np.array(last, np.uint64))
    assert keys.tolist() == [int(hash_key(*parts, number)[0]) for number in last]


@given(NUMBERS, NUMBERS)
def test_the_order_of_the_parts_matters(one: int, other: int) -> None:
    assert (hash_key(one, other) == hash_key(other, one)).all() == (one == other)
