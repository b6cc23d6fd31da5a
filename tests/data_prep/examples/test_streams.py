"""The random numbers of streams.py have the bits of SplitMix64, and the streams of any two keys are unrelated."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.corpora import CHANCE

from data_prep.common.arrays import Array
from data_prep.examples.streams import begin_stream, count_heads, draw_below, draw_bits, draw_uniform

PARTS = ("seed", "length", "duplicate", "document")
Key = tuple[int, ...]  # a number for every part
BASE: Key = (12345, 128, 3, 1000)
PINNED: dict[Key, Key] = {
    (12345, 128, 0, 0): (0x28A09A29612A548D, 0xF96B9B464A90CF1B, 0x1596A6358301FDA0),
    (12345, 512, 9, 6_000_000): (0x121A06E39CD54809, 0x3EB0083DC54F5461, 0x967E167EAB773634),
    (0, 8, 0, 0): (0x6DA57EC3C2FA212A, 0x9F20DA803FA7DABC, 0x2BA16DD2890723BE),
    (2**63 - 1, 512, 999, 2**40): (0x82A49027E4F6D49B, 0x8EB49DAE96C04CEA, 0xF4C906C2EEF6A4AD),
}


def outputs_of(key: Key, count: int) -> tuple[int, ...]:
    """The first numbers of the stream of a key."""
    state = begin_stream(*key)
    return tuple(int(draw_bits(state)) for _ in range(count))


def next_key(key: Key, part: str) -> Key:
    return tuple(value + (name == part) for name, value in zip(PARTS, key, strict=True))


def first_draws(keys: list[Key], count: int) -> Array:
    """Draws the first numbers from the streams of all keys, as an array (keys, count)."""
    states = [begin_stream(*key) for key in keys]
    return np.array([[draw_bits(state) for _ in range(count)] for state in states], np.uint64)


@pytest.mark.parametrize("key", PINNED)
def test_the_bits_of_a_key_never_change(key: Key) -> None:
    """They are those of SplitMix64, whose next numbers are published in its function of the state."""
    state = begin_stream(*key)
    assert state.dtype == np.uint64
    assert begin_stream(*map(np.int64, key)) == state
    assert outputs_of(key, 3) == PINNED[key]


def test_uniform_takes_the_high_bits_of_a_draw() -> None:
    state = begin_stream(*BASE)
    assert [draw_uniform(state) for _ in range(20)] == [(output >> 11) / 2**53 for output in outputs_of(BASE, 20)]


@given(st.integers(1, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_number_below_any_limit_is_the_exact_product(limit: int, seed: int) -> None:
    [bits] = outputs_of((seed, 1, 2, 3), 1)
    drawn = draw_below(begin_stream(seed, 1, 2, 3), limit)
    assert drawn == (((bits >> 32) * limit) >> 32 if limit < 2**32 else (bits * limit) >> 64)


@pytest.mark.parametrize("tosses", [0, 1, 63, 64, 65, 128, 130])
def test_heads_counts_the_low_bits_of_as_many_draws_as_it_needs(tosses: int) -> None:
    outputs = outputs_of(BASE, 4)
    bits = sum(output << 64 * at for at, output in enumerate(outputs)) & ((1 << tosses) - 1)
    state = begin_stream(*BASE)
    assert count_heads(state, tosses) == bits.bit_count()
    assert int(draw_bits(state)) == outputs[math.ceil(tosses / 64)]


@pytest.mark.parametrize("part", PARTS)
def test_keys_that_differ_by_one_give_unrelated_streams(part: str) -> None:
    count = 2000
    keys = [BASE]
    for _ in range(count):
        keys.append(next_key(keys[-1], part))
    draws = first_draws(keys, 3)
    flipped = np.unpackbits((draws[1:] ^ draws[:-1]).view(np.uint8).reshape(count * 3, 8), axis=1).sum(axis=0)
    assert stats.chisquare(np.stack([flipped, count * 3 - flipped]), axis=0).pvalue.min() > CHANCE / 64
    shares = draws / 2.0**64
    for one, other in itertools.product(range(3), repeat=2):
        assert stats.pearsonr(shares[:-1, one], shares[1:, other]).pvalue > CHANCE / 9
    assert stats.kstest(shares[:, 0], "uniform").pvalue > CHANCE


def test_every_key_has_its_own_stream() -> None:
    states = {
        int(begin_stream(*key)[0]) for key in itertools.product(range(8), (0, 1, 2, 3, 128, 512), range(10), range(60))
    }
    assert len(states) == 8 * 6 * 10 * 60
