"""Masks drawn anew in every epoch: which pieces of an example are predicted, and what the model sees in their place.

The key of an example gives each of its places a number, which depends on nothing else. The order of these numbers is a
ranking of the pieces, all but [CLS] and [SEP], of which a step takes the first: as many as follow from the length and
from how far the run is. So whoever knows lengths knows the counts, and any ranks draw the same masks, whenever they
begin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.hashing import GOLDEN, scramble_bits
from pretraining.model.rows import Draw, Rows

MARKS = 3
"""[CLS] and the [SEP] of A and of B, which are never chosen."""
PLACE = np.uint32(12)
"""Bits of a place in an example, which decide where two numbers are alike."""
HIGH, LOW = np.uint64(32), np.uint64(2**32 - 1)
NEVER = np.uint32(2**32 - 1)
"""The rank of what is not chosen."""


class Split(NamedTuple):
    """The shares of the chosen pieces that become [MASK], become a random piece, and stay as they are."""

    mask: float
    random: float
    same: float


class Masked(NamedTuple):
    """What the model sees of examples, and what it is to predict."""

    pieces: Array  # (n,)
    chosen: Array  # (m,) where the predicted pieces lie among all pieces, ascending
    labels: Array  # (m,) what stood there


def num_masked(length: Any, rate: float) -> Any:
    """Counts the pieces that are chosen of examples of these lengths, in which [CLS] and [SEP] count: at least one,
    rounded as in the original."""
    return np.clip(np.rint(np.multiply(length, rate)), 1, np.maximum(np.subtract(length, MARKS), 1)).astype(np.int64)


def mask_anew(rows: Rows, rate: float, split: Split, draw: Draw) -> Masked:
    """Puts back what the masks of the shards hide, and masks this share of the pieces instead."""
    numbers = number_places(draw.keys, int(rows.lengths.max()))
    which, places = choose_places(rows, num_masked(rows.lengths, rate), numbers)
    chosen, text = rows.starts[which] + places, rows.original()
    labels = text[chosen]
    text[chosen] = replace_pieces(labels, numbers[which, places], split, draw)
    return Masked(text, chosen, labels)


def number_places(keys: Array, length: int) -> Array:
    """(s, length) uint64: random numbers for the places of examples with these keys."""
    steps = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return scramble_bits(keys[:, None] + steps)


def choose_places(rows: Rows, counts: Array, numbers: Array) -> tuple[Array, Array]:
    """Takes the first so many of each example's ranking; the examples and the places in them, ascending."""
    places, sequences = np.arange(numbers.shape[1], dtype=np.uint32), np.arange(len(counts))
    assert len(places) <= 1 << PLACE, f"sequences of {len(places)}"
    ranks = ((numbers >> HIGH).astype(np.uint32) >> PLACE << PLACE) | places
    ranks[:, 0] = NEVER
    ranks[sequences, rows.boundaries - 1] = NEVER  # the [SEP] of A, or the last
    ranks[places >= rows.lengths[:, None] - 1] = NEVER
    last = np.sort(ranks, axis=1)[sequences, counts - 1]
    assert (last != NEVER).all(), "more pieces are asked for than may be chosen"
    which, chosen = np.nonzero(ranks <= last[:, None])
    return which, chosen


def replace_pieces(labels: Array, numbers: Array, split: Split, draw: Draw) -> Array:
    """What stands in place of the chosen pieces; a random piece may be any of the vocabulary, also the one it was."""
    share = (numbers & LOW) * 2.0**-32
    drawn = (scramble_bits(numbers + np.uint64(GOLDEN)) >> HIGH) * np.uint64(draw.vocabulary) >> HIGH
    stay = np.where(share < split.mask + split.random, drawn.astype(np.int64), labels)
    replaced: Array = np.where(share < split.mask, draw.mask_piece, stay)
    return replaced
