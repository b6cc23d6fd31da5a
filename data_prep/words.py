"""Cuts sentences into words as BERT does, in compiled code, and numbers the distinct words.

Real text repeats itself: half a million sentences of Wikipedia hold eight million words, but only some two hundred
thousand different ones. So the expensive part of WordPiece (Unicode normalisation, the greedy search for pieces) is
done by `tokenizers` once for each distinct word, and a pass over the raw bytes does the rest.

That is exact, not an approximation. BERT's normalisation works character by character, and white space, each ASCII
punctuation mark and each Chinese character stand apart whatever is beside them. A run of other characters is

* lower-cased (unless cased) and freed of control characters if it is ASCII: a word;
* kept as it is if it is not, for `tokenizers` to normalise and perhaps split: an opaque word.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from data_prep.arrays import Array

SPACE, DROP, MARK, LETTER, FOREIGN = 0, 1, 2, 3, 4
LONGEST_WORD = 100  # characters; WordPiece calls anything longer unknown
FNV_OFFSET, FNV_PRIME = np.uint64(14695981039346656037), np.uint64(1099511628211)


def character_classes() -> Array:
    """What each byte is to BERT's cleaner: white space, dropped, a punctuation mark, a letter or not ASCII."""
    classes = np.full(256, LETTER, np.uint8)
    classes[:32] = DROP
    classes[127] = DROP
    classes[[9, 10, 13, 32]] = SPACE
    for first, last in ((33, 47), (58, 64), (91, 96), (123, 126)):
        classes[first : last + 1] = MARK
    classes[128:] = FOREIGN
    return classes


def letter_forms(cased: bool) -> Array:
    """The byte that each byte is written as: itself, or its lower case."""
    forms = np.arange(256, dtype=np.uint8)
    if not cased:
        forms[ord("A") : ord("Z") + 1] += 32
    return forms


class WordTable:
    """The distinct words met so far, numbered in the order of their first appearance."""

    def __init__(self, cased: bool) -> None:
        self._classes, self._forms = character_classes(), letter_forms(cased)
        self._slots = np.full(1 << 16, -1, np.int32)  # open addressing: hash -> number of a word
        self._letters = np.empty(1 << 20, np.uint8)  # all words, one after another
        self._ends = np.empty(1 << 16, np.int64)  # where each word ends in _letters
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        """Bytes that the words take."""
        return int(self._ends[self._size - 1]) if self._size else 0

    def words(self, first: int = 0) -> list[str]:
        """The words numbered from `first` on."""
        start = int(self._ends[first - 1]) if first else 0
        letters = self._letters[start : self.num_bytes].tobytes()
        ends = self._ends[first : self._size] - start
        starts = np.concatenate([[0], ends])[:-1]
        return [letters[a:b].decode() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def number(self, text: Array, ends: Array) -> tuple[Array, Array]:
        """The number of each word of `text` (UTF-8 bytes), and where each sentence ends among them.

        `ends` are the positions in `text` at which the sentences end.
        """
        numbers, word_ends, self._slots, self._letters, self._ends, self._size = _number_words(
            text, ends, self._classes, self._forms, self._slots, self._letters, self._ends, self._size
        )
        return numbers, word_ends


@njit(cache=True)
def _grown(array, needed):  # type: ignore[no-untyped-def]
    """`array`, or a copy with room for `needed` entries."""
    if needed <= array.size:
        return array
    larger = np.empty(max(needed, array.size * 2), array.dtype)
    larger[: array.size] = array
    return larger


@njit(cache=True)
def _hash(letters):  # type: ignore[no-untyped-def]
    value = FNV_OFFSET
    for letter in letters:
        value = (value ^ np.uint64(letter)) * FNV_PRIME
    return value ^ (value >> np.uint64(29))


@njit(cache=True)
def _rehashed(size, letters, ends, num_words):  # type: ignore[no-untyped-def]
    slots = np.full(size, -1, np.int32)
    mask = np.uint64(size - 1)
    for word in range(num_words):
        start = ends[word - 1] if word else 0
        slot = _hash(letters[start : ends[word]]) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = word
    return slots


@njit(cache=True)
def _look_up(word, slots, letters, ends):  # type: ignore[no-untyped-def]
    """The slot that holds `word`, or the free one where it belongs."""
    mask = np.uint64(slots.size - 1)
    slot = _hash(word) & mask
    while slots[slot] >= 0:
        known = slots[slot]
        start = ends[known - 1] if known else 0
        if ends[known] - start == word.size:
            same = True
            for index in range(word.size):
                if letters[start + index] != word[index]:
                    same = False
                    break
            if same:
                break
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(cache=True)
def _ideograph(text, at, stop):  # type: ignore[no-untyped-def]
    """How many bytes the Chinese character at `at` has, 0 if it is none: the ranges that BERT sets apart."""
    lead = text[at]
    if lead < 0xE3 or at + 2 >= stop:
        return 0
    low = np.int64(text[at + 1] & 0x3F) << 6 | np.int64(text[at + 2] & 0x3F)
    if lead < 0xF0:
        code = np.int64(lead & 0x0F) << 12 | low
        if 0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0xF900 <= code <= 0xFAFF:
            return 3
    elif at + 3 < stop:
        code = np.int64(lead & 0x07) << 18 | low << 6 | np.int64(text[at + 3] & 0x3F)
        if 0x20000 <= code <= 0x2A6DF or 0x2A700 <= code <= 0x2B81F:
            return 4
        if 0x2B820 <= code <= 0x2CEAF or 0x2F800 <= code <= 0x2FA1F:
            return 4
    return 0


@njit(cache=True)
def _next_run(text, at, stop, classes):  # type: ignore[no-untyped-def]
    """Where the run that begins at `at` ends, and whether it has more than ASCII."""
    foreign = False
    while at < stop:
        kind = classes[text[at]]
        if kind in (SPACE, MARK):
            break
        if kind == FOREIGN:
            if _ideograph(text, at, stop):
                break
            foreign = True
        at += 1
    return at, foreign


@njit(cache=True)
def _next_word(text, at, stop, classes, forms, word):  # type: ignore[no-untyped-def]
    """Writes the next word of text[at:stop] into `word`; returns its size, 0 if there is none, and where to go on."""
    while at < stop and (classes[text[at]] == SPACE or classes[text[at]] == DROP):
        at += 1
    if at == stop:
        return 0, at
    size = 1 if classes[text[at]] == MARK else _ideograph(text, at, stop)
    if size:
        word[:size] = text[at : at + size]
        return size, at + size
    end, foreign = _next_run(text, at, stop, classes)
    if foreign:
        word[: end - at] = text[at:end]
        return end - at, end
    for index in range(at, end):
        if classes[text[index]] == LETTER and size <= LONGEST_WORD:
            word[size] = forms[text[index]]
            size += 1
    return size, end


@njit(cache=True)
def _number_words(text, sentence_ends, classes, forms, slots, letters, ends, num_words):  # type: ignore[no-untyped-def]
    numbers = np.empty(text.size, np.int32)
    word_ends = np.empty(sentence_ends.size, np.int64)
    longest, start = 0, 0
    for stop in sentence_ends:
        longest, start = max(longest, stop - start), stop
    word = np.empty(longest, np.uint8)
    count, at = 0, 0
    for sentence in range(sentence_ends.size):
        stop = sentence_ends[sentence]
        while at < stop:
            size, at = _next_word(text, at, stop, classes, forms, word)
            if size == 0:
                continue
            slot = _look_up(word[:size], slots, letters, ends)
            if slots[slot] < 0:
                slots[slot] = num_words
                end = ends[num_words - 1] if num_words else 0
                letters = _grown(letters, end + size)
                letters[end : end + size] = word[:size]
                ends = _grown(ends, num_words + 1)
                ends[num_words] = end + size
                num_words += 1
            numbers[count] = slots[slot]
            count += 1
            if num_words * 2 > slots.size:
                slots = _rehashed(slots.size * 2, letters, ends, num_words)
        word_ends[sentence] = count
    return numbers[:count].copy(), word_ends, slots, letters, ends, num_words
