"""Finds words in a table by their keys, in compiled code.

A key is two numbers of 64 bits. A short word is its own key: its letters and their number, so that no letters are
compared. The key of a longer word ends in a hash, and its letters are compared too.
"""

from __future__ import annotations

import sys

import numpy as np

from data_prep.common.compiled import compiled, copy_items
from data_prep.common.hashing import FACTOR_1, GOLDEN

SLOT = np.dtype([("low", np.uint64), ("high", np.uint64), ("number", np.int64)])
"""A place for a word in a table: its key, of which `high` is 0 while the place is free, and its number."""
SHORT = 15  # the most bytes of a word in its key, whose last byte is their number
LONGER = np.uint64(0xFF << 56)  # the last byte of the key of a longer word
LOW_FACTOR, HIGH_FACTOR = np.uint64(GOLDEN), np.uint64(FACTOR_1)
assert sys.byteorder == "little", "the first of eight letters is read into the lowest byte of a number"


@compiled
def make_short_key(low, high, size):
    """Makes the key of a word of at most SHORT bytes, with which `low` and then `high` begin."""
    if size < 8:
        return _keep_first_bytes(low, size), np.uint64(size) << np.uint64(56)
    return low, _keep_first_bytes(high, size - 8) | np.uint64(size) << np.uint64(56)


@compiled
def _keep_first_bytes(eight, size):
    """Clears all but the first `size` of eight bytes, at most seven."""
    return eight & ((np.uint64(1) << np.uint64(8 * size)) - np.uint64(1))


@compiled
def make_key(word, size):
    """Makes the key of the first `size` bytes of `word`, an array with eight bytes in a number."""
    if size <= SHORT:
        return make_short_key(word[0], word[1], size)
    value = np.uint64(size)
    for index in range(1, size >> 3):
        value = _mix_bits(value ^ word[index])
    if size & 7:
        value = _mix_bits(value ^ _keep_first_bytes(word[size >> 3], size & 7))
    return word[0], value | LONGER


@compiled
def _mix_bits(value):
    """Scrambles the bits of a hash a little."""
    value = value * HIGH_FACTOR
    return value ^ value >> np.uint64(32)


@compiled
def _choose_first_slot(low, high, last):
    """Chooses the slot, of those up to `last`, where the search for a key begins."""
    return np.int64((low * LOW_FACTOR ^ high * HIGH_FACTOR) >> np.uint64(32)) & last


@compiled
def find(slots, low, high):
    """Finds the first slot that has a key, or the free one where it belongs."""
    last = slots.size - 1
    slot = _choose_first_slot(low, high, last)
    while slots[slot].high and (slots[slot].high != high or slots[slot].low != low):
        slot = (slot + 1) & last
    return slot


@compiled
def look_up(word, size, slots, letters, ends):
    """Finds the slot of the word that is the first `size` bytes of `word`, or the free one where it belongs."""
    low, high = make_key(word, size)
    slot = find(slots, low, high)
    if size > SHORT:
        while slots[slot].high and not _is_word(word.view(np.uint8), size, slots[slot].number, letters, ends):
            slot = (slot + 1) & (slots.size - 1)
    return slot


@compiled
def _is_word(word, size, number, letters, ends):
    """Tells whether word[:size] is the word that has the number."""
    start = ends[number - 1] if number else 0
    if ends[number] - start != size:
        return False
    index = 0
    while index < size and letters[start + index] == word[index]:
        index += 1
    return index == size


@compiled
def occupy(slots, slot, word, size, number):
    """Gives a word the free slot where it belongs."""
    slots[slot].low, slots[slot].high = make_key(word, size)
    slots[slot].number = number


@compiled
def enlarge_table(slots, size):
    """Makes a table of `size` slots with all that the one before holds."""
    larger = np.zeros(size, SLOT)
    for old in slots:
        if old.high:
            slot = _choose_first_slot(old.low, old.high, size - 1)
            while larger[slot].high:  # by whatever: no word is there twice
                slot = (slot + 1) & (size - 1)
            larger[slot] = old
    return larger


@compiled
def make_table(letters, ends, size):
    """Makes a table of `size` slots for words that end at `ends` in `letters`, numbered in their order."""
    slots = np.zeros(size, SLOT)
    word = np.empty((letters.size >> 3) + 2, np.uint64)
    start = 0
    for number in range(ends.size):
        copy_items(word.view(np.uint8), 0, letters, start, ends[number])
        slot = look_up(word, ends[number] - start, slots, letters, ends)
        occupy(slots, slot, word, ends[number] - start, number)
        start = ends[number]
    return slots


@compiled
def number_word(low, high, word, size, slots, letters, ends, num_words):
    """Looks up the number of a word; one that is new becomes the last in the table.

    The letters of a short word are those of its key, and need not be in `word` before.
    """
    if size <= SHORT:
        word[0], word[1] = low, high
    slot = look_up(word, size, slots, letters, ends)
    if not slots[slot].high:
        occupy(slots, slot, word, size, num_words)
        end = ends[num_words - 1] if num_words else 0
        copy_items(letters, end, word.view(np.uint8), 0, size)
        ends[num_words] = end + size
    return slots[slot].number
