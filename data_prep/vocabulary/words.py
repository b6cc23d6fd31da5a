"""Cuts sentences into words as BERT does, in compiled code, and numbers the distinct words.

Real text repeats itself: half a million sentences of Wikipedia hold eight million words, but only some two hundred
thousand different ones. So the expensive part of WordPiece (Unicode normalisation, the greedy search for pieces) is
done once for every distinct word, and a pass over the raw bytes does the rest.

That is exact, not an approximation. BERT's normalisation works character by character, and white space, ASCII
punctuation marks and Chinese characters stand apart whatever is beside them. A run of other characters is

* lower-cased (unless cased) and freed of control characters if it is ASCII: a word;
* kept as it is if it is not, for `tokenizers` to normalise and perhaps split: an opaque word.
"""

from __future__ import annotations

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.vocabulary.vocabulary import LONGEST_WORD

SPACE, DROP, MARK, FOREIGN = 0, 1, 2, 3  # what a byte can be besides a letter
FNV_OFFSET, FNV_PRIME = np.uint64(14695981039346656037), np.uint64(1099511628211)


def byte_forms(cased: bool) -> Array:
    """Tells what a byte is to BERT: white space, dropped, a mark, not ASCII, or the letter that it is written as."""
    forms = np.arange(256, dtype=np.uint8)
    forms[:32] = DROP
    forms[127] = DROP
    forms[[9, 10, 13, 32]] = SPACE
    for first, last in ((33, 47), (58, 64), (91, 96), (123, 126)):
        forms[first : last + 1] = MARK
    forms[128:] = FOREIGN
    if not cased:
        forms[ord("A") : ord("Z") + 1] += 32
    return forms


class WordTable:
    """The distinct words met so far, numbered in the order of their first appearance."""

    def __init__(self, cased: bool) -> None:
        self._forms = byte_forms(cased)
        self._slots = np.full(1 << 16, -1, np.int32)  # open addressing: hash -> number of a word
        self._letters = np.empty(1 << 20, np.uint8)  # all words, one after another
        self._ends = np.empty(1 << 16, np.int64)  # where every word ends in _letters
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_bytes(self) -> int:
        """Counts the bytes that the words take."""
        return int(self._ends[self._size - 1]) if self._size else 0

    def words(self) -> list[str]:
        """Lists all words."""
        return spell_out(*self.letters(), np.arange(self._size))

    def letters(self, first: int = 0) -> tuple[Array, Array]:
        """Gives the letters of the words from the number `first` on, and where every word ends in them."""
        start = int(self._ends[first - 1]) if first else 0
        return self._letters[start : self.num_bytes], self._ends[first : self._size] - start

    def number(self, text: Array, ends: Array) -> tuple[Array, Array]:
        """Numbers the words of `text`, bytes of UTF-8 in which the sentences end at `ends`.

        Returns the numbers of the words in the order of the text, and where every sentence ends among them.
        """
        numbers, word_ends = np.empty(len(text), np.int32), np.empty(len(ends), np.int64)
        longest = np.diff(ends, prepend=0).max(initial=0)
        word = np.empty(longest, np.uint8)
        state = np.zeros(3, np.int64)  # bytes read, words found, sentences finished
        while state[2] < len(ends):
            self._grow(longest)
            table = (self._slots, self._letters, self._ends)
            found = (state, numbers, word_ends)
            self._size = _number_words(text, ends, self._forms, word, *table, self._size, *found)
        return numbers[: state[1]].copy(), word_ends

    def _grow(self, longest: int) -> None:
        """Makes room for more words, even the longest that can come."""
        if self._size * 2 >= len(self._slots):
            self._slots = rehashed(len(self._slots) * 4, self._letters, self._ends, self._size)
        self._ends = _with_room(self._ends, self._size + 1)
        self._letters = _with_room(self._letters, self.num_bytes + longest)


def spell_out(letters: Array, ends: Array, chosen: Array) -> list[str]:
    """Lists the chosen words of those whose letters end at `ends`."""
    text = letters.tobytes()
    starts = np.concatenate([[0], ends])[chosen]
    return [text[start:end].decode() for start, end in zip(starts.tolist(), ends[chosen].tolist(), strict=True)]


def _with_room(array: Array, needed: int) -> Array:
    """Returns the array, or a copy at least twice as large where it has no room for so many entries."""
    if needed <= len(array):
        return array
    larger = np.empty(max(needed, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


@compiled
def _hash(letters, start, end):
    """Hashes a word as FNV-1a does, to find its slot in the table."""
    value = FNV_OFFSET
    for at in range(start, end):
        value = (value ^ np.uint64(letters[at])) * FNV_PRIME
    return value ^ (value >> np.uint64(29))


@compiled
def rehashed(size, letters, ends, num_words):
    """Makes a table of `size` slots for all words, when the one before is half full."""
    slots = np.full(size, -1, np.int32)
    mask = np.uint64(size - 1)
    start = 0
    for word in range(num_words):
        slot = _hash(letters, start, ends[word]) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = word
        start = ends[word]
    return slots


@compiled
def look_up(word, size, slots, letters, ends):
    """Finds the slot that holds word[:size], or the free one where it belongs."""
    mask = np.uint64(slots.size - 1)
    slot = _hash(word, 0, size) & mask
    while slots[slot] >= 0:
        known = slots[slot]
        start = ends[known - 1] if known else 0
        if ends[known] - start == size:
            index = 0
            while index < size and letters[start + index] == word[index]:
                index += 1
            if index == size:
                break
        slot = (slot + np.uint64(1)) & mask
    return slot


@compiled
def _ideograph(text, at, stop):
    """Counts the bytes of the Chinese character at `at`, one of those that `tokenizers` sets apart; 0 if it is none."""
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
        if 0x2B920 <= code <= 0x2CEAF or 0x2F800 <= code <= 0x2FA1F:
            return 4
    return 0


@compiled
def _next_word(text, at, stop, forms, word):
    """Writes the next word of text[at:stop] into `word`; returns its size, 0 at the end, and where to go on."""
    while at < stop and forms[text[at]] <= DROP:
        at += 1
    size, start = 0, at
    while at < stop:
        form = forms[text[at]]
        if form > FOREIGN:
            if size <= LONGEST_WORD:
                word[size] = form
                size += 1
        elif form != DROP:
            if form == FOREIGN and not _ideograph(text, at, stop):
                return _opaque_word(text, start, stop, forms, word)
            break
        at += 1
    if size == 0 and at < stop:  # at a mark or a Chinese character
        size = max(1, _ideograph(text, at, stop))
        copy_items(word, 0, text, at, at + size)
        at += size
    return size, at


@compiled
def _opaque_word(text, start, stop, forms, word):
    """Writes the word that begins at `start` into `word` as it stands; returns its size and where to go on."""
    at = start
    while at < stop and forms[text[at]] not in (SPACE, MARK):
        if forms[text[at]] == FOREIGN and _ideograph(text, at, stop):
            break
        at += 1
    copy_items(word, 0, text, start, at)
    return at - start, at


@compiled
def _number_words(text, sentence_ends, forms, word, slots, letters, ends, num_words, state, numbers, word_ends):
    """Numbers words from `state` on until all sentences are done or the table must grow; returns its size by then."""
    at, count, sentence = state[0], state[1], state[2]
    room = letters.size - word.size  # for another word of any size
    while sentence < sentence_ends.size:
        stop = sentence_ends[sentence]
        while at < stop:
            if num_words * 2 >= slots.size or num_words == ends.size or (num_words and ends[num_words - 1] > room):
                state[0], state[1], state[2] = at, count, sentence
                return num_words
            size, at = _next_word(text, at, stop, forms, word)
            if size == 0:
                break
            slot = look_up(word, size, slots, letters, ends)
            if slots[slot] < 0:
                slots[slot] = num_words
                end = ends[num_words - 1] if num_words else 0
                copy_items(letters, end, word, 0, size)
                ends[num_words] = end + size
                num_words += 1
            numbers[count] = slots[slot]
            count += 1
        word_ends[sentence] = count
        at = stop
        sentence += 1
    state[0], state[1], state[2] = at, count, sentence
    return num_words
