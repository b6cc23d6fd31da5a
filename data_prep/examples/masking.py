"""Chooses the pieces of an example that the model has to predict, and what stands in their place.

A share of the pieces is chosen, at least one and at most a set number; [CLS] and [SEP] are counted but never chosen,
and no text has these pieces.
Of those chosen, 80% become [MASK], 10% a random piece of the whole vocabulary and 10% stay as they are. Where whole
words are masked, `##` pieces go with the word before them, and a word that would exceed the number is passed over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.examples.streams import draw_below, draw_uniform


class Masking(NamedTuple):
    """The rules by which examples of up to one length are masked."""

    predictions: Array  # (length + 1,) how many pieces of an example are predicted, by its length
    whole_word: bool
    continues: Array  # (vocabulary,) whether a piece continues a word
    mask_piece: int
    separator: int
    mask_share: float  # which share of the chosen pieces becomes [MASK]
    random_share: float  # which share of the chosen pieces becomes a random piece


def count_predictions(length: int, rate: float, most: int) -> Array:
    """Works out how many pieces of an example are predicted, for all lengths up to `length`.

    They are rounded by Python's own `round`, as in the original: a half goes to the even neighbour.
    """
    return np.array([min(most, max(1, round(size * rate))) for size in range(length + 1)], np.int64)


@compiled
def choose_words(state, candidates, words, wanted):
    """Moves the pieces of the chosen words to the front of the candidates, and returns how many they are.

    `words` has where every word begins among the candidates, and their number at its end; the words are shuffled as
    far as is needed.
    """
    num_words = words.size - 1
    order = np.arange(num_words)
    chosen = np.empty(wanted, np.int64)
    count = 0
    for at in range(num_words):
        if count == wanted:
            break
        other = at + draw_below(state, num_words - at)
        order[at], order[other] = order[other], order[at]
        start, end = words[order[at]], words[order[at] + 1]
        if count + end - start > wanted:
            continue
        copy_items(chosen, count, candidates, start, end)
        count += end - start
    copy_items(candidates, 0, chosen, 0, count)
    return count


@compiled
def sort_positions(positions, count, size, chosen):
    """Sorts the first positions, which are below `size`, without a branch that depends on what was drawn.

    `chosen` is room for a note of every position.
    """
    for position in range(size):
        chosen[position] = 0
    for index in range(count):
        chosen[positions[index]] = 1
    found = 0
    for position in range(size):
        positions[found] = position
        found += chosen[position]


@compiled
def find_words(pieces, boundary, masking, candidates, words):
    """Fills in the positions that may be chosen, and where every word begins among them; counts the words.

    Unless whole words are masked, each piece counts as one.
    `boundary` is where B begins; [CLS], the last [SEP] and all separators are no candidates.
    A piece that continues a word belongs to the one before it, even if B begins with it and the word is the last of A,
    as in the original, which looks at nothing but the pieces. Another document begins with a word.
    """
    count, num_words = 0, 0
    for position in range(1, pieces.size - 1):
        if pieces[position] == masking.separator:
            continue
        begins = count == 0 or (pieces[position - 1] == masking.separator and position != boundary)
        if begins or not (masking.whole_word and masking.continues[pieces[position]]):
            words[num_words] = count
            num_words += 1
        candidates[count] = position
        count += 1
    words[num_words] = count
    return num_words


@compiled
def mask_example(state, pieces, boundary, masking, candidates, words, positions, labels, split):
    """Masks the pieces in place; fills in the positions masked, in their order, and the pieces that stood there.

    Returns how many there are, and adds the pieces masked, replaced and kept to `split`.
    """
    num_words = find_words(pieces, boundary, masking, candidates, words)
    wanted = min(masking.predictions[pieces.size], words[num_words])
    if masking.whole_word:
        count = choose_words(state, candidates, words[: num_words + 1], wanted)
    else:
        count = wanted
        for at in range(count):
            other = at + draw_below(state, num_words - at)
            candidates[at], candidates[other] = candidates[other], candidates[at]
    sort_positions(candidates, count, pieces.size, words)
    copy_items(positions, 0, candidates, 0, count)
    for index in range(count):
        position = positions[index]
        labels[index] = pieces[position]
        share = draw_uniform(state)
        if share < masking.mask_share:
            pieces[position] = masking.mask_piece
            split[0] += 1
        elif share < masking.mask_share + masking.random_share:
            pieces[position] = draw_below(state, masking.continues.size)
            split[1] += 1
        else:
            split[2] += 1
    return count
