"""Dynamic masks: draws in every epoch which pieces of an example are predicted, and by which pieces they are replaced.

The key of an example gives each of its places a number, which depends on nothing else. These numbers rank the pieces,
except [CLS] and [SEP]. A step takes the first pieces of the ranking; their count follows from the length and from the
share of the run that is done. So the counts are known from the lengths alone, and all ranks draw the same masks, also
after a restart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.hashing import GOLDEN, scramble_bits
from pretraining.model.rows import Draw, Rows

MARKS = 3
"""The number of [CLS] and [SEP] in an example, which are never chosen."""
PLACE, LONG_PLACE = np.uint32(12), np.uint32(16)
"""The low bits of a rank hold the place: so many of them, and so many in examples of more than 4,096 pieces. Of two
equal random numbers, the earlier place ranks first."""
HIGH, LOW = np.uint64(32), np.uint64(2**32 - 1)
NEVER = np.uint32(2**32 - 1)
"""The rank of pieces that are never chosen."""


class Split(NamedTuple):
    """The shares of the chosen pieces that become [MASK], become a random piece, and stay as they are."""

    mask: float
    random: float
    same: float


class Masked(NamedTuple):
    """The pieces that the model sees, and those that it must predict."""

    pieces: Array  # (n,)
    chosen: Array  # (m,) where the predicted pieces lie among all pieces, ascending
    labels: Array  # (m,) the original pieces there


def count_masked(length: Any, mask_rate: float) -> Any:
    """Counts the pieces that are chosen of examples of these lengths, in which [CLS] and [SEP] count: at least one,
    rounded as in the original."""
    most = np.maximum(np.subtract(length, MARKS), 1)
    return np.clip(np.rint(np.multiply(length, mask_rate)), 1, most).astype(np.int64)


def draw_masks(rows: Rows, mask_rate: float, split: Split, draw: Draw) -> Masked:
    """Restores the pieces that the masks of the shards hide, and masks this share of the pieces instead."""
    numbers = number_places(draw.keys, int(rows.lengths.max()))
    text = rows.restore_text()
    separators = np.flatnonzero(text == draw.separator)
    which, places = choose_places(rows, count_masked(rows.lengths, mask_rate), numbers, separators)
    chosen = rows.starts[which] + places
    labels = text[chosen]
    text[chosen] = replace_pieces(labels, numbers[which, places], split, draw)
    return Masked(text, chosen, labels)


def number_places(keys: Array, length: int) -> Array:
    """Draws random numbers for the places of examples with these keys: (s, length) uint64."""
    return scramble_bits(keys[:, None] + np.arange(1, length + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def choose_places(rows: Rows, counts: Array, numbers: Array, separators: Array) -> tuple[Array, Array]:
    """Takes the first `counts` pieces of each example's ranking; returns examples and places in them, ascending.

    `separators` has the places of all [SEP] among all pieces.
    """
    places, sequences = np.arange(numbers.shape[1], dtype=np.uint32), np.arange(len(counts))
    assert len(places) <= 1 << LONG_PLACE, f"sequences of {len(places)}"
    bits = np.where(rows.lengths > 1 << PLACE, LONG_PLACE, PLACE)[:, None]
    ranks = ((numbers >> HIGH).astype(np.uint32) >> bits << bits) | places
    ranks[:, 0] = NEVER
    ranks[places >= rows.lengths[:, None] - 1] = NEVER
    home = np.searchsorted(rows.starts, separators, side="right") - 1
    ranks[home, separators - rows.starts[home]] = NEVER
    last = np.sort(ranks, axis=1)[sequences, counts - 1]
    assert (last != NEVER).all(), "more pieces than may be chosen"
    which, chosen = np.nonzero(ranks <= last[:, None])
    return which, chosen


def replace_pieces(labels: Array, numbers: Array, split: Split, draw: Draw) -> Array:
    """Draws the pieces that replace the chosen ones; a random piece may be any of the vocabulary, also the original."""
    share = (numbers & LOW) * 2.0**-32
    drawn = (scramble_bits(numbers + np.uint64(GOLDEN)) >> HIGH) * np.uint64(draw.vocabulary) >> HIGH
    stay = np.where(share < split.mask + split.random, drawn.astype(np.int64), labels)
    return np.where(share < split.mask, draw.mask_piece, stay)
