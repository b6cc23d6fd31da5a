"""Random numbers for compiled code: one independent stream for every key, the same on every machine.

A stream is SplitMix64 (Steele, Lea & Flood 2014): 64 bits of state, a full period, and results that depend on integer
arithmetic alone. A key such as (seed, length, duplicate, document) is folded into the state, so what a document
becomes depends on no other document, worker or rank.
"""

from __future__ import annotations

import numpy as np

from data_prep.common.compiled import compiled
from data_prep.vocabulary.tokens import INCREMENT, scramble

BITS_32, BITS_11 = np.uint64(32), np.uint64(11)
LOW_32 = np.uint64(2**32 - 1)


@compiled
def begin_stream(seed, length, duplicate, document):
    """Begins the stream of a document; returns it as an array of its one word of state, which the draws change."""
    state = np.empty(1, np.uint64)
    state[0] = scramble(np.uint64(seed) + INCREMENT)
    for part in (length, duplicate, document):
        state[0] = scramble((state[0] ^ np.uint64(part)) + INCREMENT)
    return state


@compiled
def draw_bits(state):
    """Draws 64 random bits."""
    state[0] += INCREMENT
    return scramble(state[0])


@compiled
def draw_below(state, limit):
    """Draws an integer, uniform in 0 … limit-1: the upper 64 bits of the product of 64 random bits and the limit.

    For a limit below 2³² the upper half of the bits is enough.
    """
    bits, limit = draw_bits(state), np.uint64(limit)
    if limit <= LOW_32:
        return np.int64(((bits >> BITS_32) * limit) >> BITS_32)
    lower = (bits & LOW_32) * (limit & LOW_32)
    middle = (bits >> BITS_32) * (limit & LOW_32) + (lower >> BITS_32)
    other = (bits & LOW_32) * (limit >> BITS_32) + (middle & LOW_32)
    return np.int64((bits >> BITS_32) * (limit >> BITS_32) + (middle >> BITS_32) + (other >> BITS_32))


@compiled
def draw_uniform(state):
    """Draws a number, uniform in [0, 1)."""
    return np.float64(draw_bits(state) >> BITS_11) * 2.0**-53


@compiled
def count_heads(state, tosses):
    """Counts how many tosses of a fair coin fall heads, 64 tosses at a time."""
    count = np.int64(0)
    while tosses > 0:
        bits = draw_bits(state)
        if tosses < 64:
            bits &= (np.uint64(1) << np.uint64(tosses)) - np.uint64(1)
        while bits:
            bits &= bits - np.uint64(1)
            count += 1
        tosses -= 64
    return count
