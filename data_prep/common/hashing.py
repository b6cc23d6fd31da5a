"""Hashes of 64-bit numbers, in NumPy: they come out alike on every machine, since they need integer arithmetic alone.

They are those of the generator SplitMix64 (Steele, Lea & Flood 2014).
"""

from __future__ import annotations

import numpy as np

from data_prep.common.arrays import Array

GOLDEN, FACTOR_1, FACTOR_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the constants of SplitMix64
BITS_64 = (1 << 64) - 1


def scramble_bits(values: Array) -> Array:
    """Scrambles the bits of 64-bit numbers, so that numbers that are alike give results that are not.

    No two numbers give the same result. The function also compiles with numba, for a single number.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FACTOR_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(FACTOR_2)
    scrambled: Array = values ^ (values >> np.uint64(31))
    return scrambled


def hash_key(*parts: int | Array) -> Array:
    """Makes one 64-bit key of several numbers, such as a seed, an epoch and a shard, for all that is drawn for them.

    A part may be an array, which gives an array of keys; numbers alone give an array of one key.
    """
    key = np.zeros(1, np.uint64)
    for part in parts:
        word = np.uint64(part & BITS_64) if isinstance(part, int) else part.astype(np.uint64)
        key = scramble_bits((key ^ word) + np.uint64(GOLDEN))
    return key
