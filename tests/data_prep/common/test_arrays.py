"""Ranges of numbers beside a plain loop, and the hashes of 64-bit numbers: the same on every machine."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.common.arrays import ranges
from data_prep.common.compiled import compiled
from data_prep.common.hashing import hash_key, scramble_bits

NUMBERS = st.integers(0, 2**64 - 1)
compiled_scramble = compiled(scramble_bits)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5))))
def test_ranges_follow_one_another(given_ranges: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(given_ranges, np.int64).reshape(-1, 2).T
    expected = [number for start, length in given_ranges for number in range(start, start + length)]
    assert ranges(starts, lengths).tolist() == expected


def test_bits_are_scrambled_as_in_splitmix64() -> None:
    """The generator SplitMix64 is published with its first numbers for the seed 1234567."""
    steps = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert scramble_bits(steps).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_are_those_by_which_runs_have_read_their_examples() -> None:
    """Other keys would change the order of the examples in the middle of a run."""
    assert hash_key(7, 3, 0).tolist() == [11248596980798508817]
    assert hash_key(7, 3, 1, np.arange(2)).tolist() == [11012453653248285810, 2826987509315806722]
    assert hash_key(-1).tolist() == hash_key(2**64 - 1).tolist()


@settings(max_examples=30)
@given(st.lists(NUMBERS, min_size=2, max_size=12, unique=True))
def test_numbers_are_scrambled_to_keys_of_their_own(numbers: list[int]) -> None:
    """Compiled code scrambles one as NumPy does many; keys depend on the order of their parts, and on each."""
    scrambled = scramble_bits(np.array(numbers, np.uint64))
    assert len(set(scrambled.tolist())) == len(numbers)
    assert int(compiled_scramble(np.uint64(numbers[0]))) == int(scrambled[0])
    keys = hash_key(*numbers[:3], np.array(numbers, np.uint64))
    assert keys.tolist() == [int(hash_key(*numbers[:3], number)[0]) for number in numbers]
    assert hash_key(*numbers[:2]) != hash_key(*numbers[1::-1])
