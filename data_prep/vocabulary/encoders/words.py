"""Cuts sentences into words as BERT does, in compiled code, and numbers the distinct words.

Real text repeats itself: half a million sentences of Wikipedia hold eight million words, but only some two hundred
thousand different ones. So the expensive part of WordPiece (Unicode normalisation, the greedy search for pieces) is
done once for every distinct word, and a pass over the raw bytes does the rest.

That is exact, not an approximation. BERT's normalisation works character by character, and white space, ASCII
punctuation marks and Chinese characters stand apart whatever is beside them. A run of other characters is

* lower-cased (unless cased) and freed of control characters if it is ASCII: a word;
* kept as it is if it is not, for `tokenizers` to normalise and perhaps split: an opaque word.

Most words are short, and have no characters that are Chinese or dropped. They are read eight bytes at once and found by
their keys (keys.py). The others are read byte by byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.vocabulary.encoders.keys import SHORT, SLOT, enlarge_table, find, make_key, make_short_key, number_word
from data_prep.vocabulary.encoders.splitting import LONGEST_WORD

SPACE, DROP, MARK, FOREIGN = 0, 1, 2, 3  # kinds of bytes that are no letters
EIGHT = np.dtype([("bytes", np.uint64)])  # as a record it may lie anywhere, not only at multiples of eight
EACH = np.uint64(0x0101010101010101)  # times a byte: that byte eight times
HIGHEST = np.uint64(0x80) * EACH  # the highest bit of every byte
SMALL = np.uint64(0x20) * EACH  # the bit by which a small letter differs from a capital one
# Added to a byte of 0 to 127, these set its highest bit if it is not under a letter or digit, or if it is beyond. One
# of 128 or more counts without its highest bit; beyond E2 it may begin a Chinese character.
FROM_A, BEYOND_Z = np.uint64(128 - ord("a")) * EACH, np.uint64(127 - ord("z")) * EACH
FROM_0, BEYOND_9 = np.uint64(128 - ord("0")) * EACH, np.uint64(127 - ord("9")) * EACH
BEYOND_E2 = np.uint64(0xFF - 0xE2) * EACH


def classify_bytes(cased: bool) -> Array:
    """Classifies bytes as BERT does: SPACE, DROP, MARK, FOREIGN (not ASCII), or the letter that it becomes."""
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
        self._forms = classify_bytes(cased)
        self._slots = np.zeros(1 << 16, SLOT)
        self._letters = np.empty(1 << 20, np.uint8)  # all words, one after another
        self._ends = np.empty(1 << 16, np.int64)  # where every word ends in _letters
        self._size = 0
        self.num_beyond = 0  # letters of the words numbered last that are not kept: those of ASCII beyond the longest

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
        """Returns the letters of the words from the number `first` on, and where every word ends in them."""
        start = int(self._ends[first - 1]) if first else 0
        return self._letters[start : self.num_bytes], self._ends[first : self._size] - start

    def number(self, text: Array, ends: Array) -> tuple[Array, Array]:
        """Numbers the words of `text`, bytes of UTF-8 in which the sentences end at `ends`.

        Returns the numbers of the words in the order of the text, and where every sentence ends among them.
        """
        numbers, word_ends = np.empty(len(text), np.int32), np.empty(len(ends), np.int64)
        eights = np.ndarray(max(0, len(text) - 7), EIGHT, text, strides=(1,))  # one from every byte on, copying none
        word = np.empty(int(np.diff(ends, prepend=0).max(initial=0)) // 8 + 2, np.uint64)  # has room for any word
        # bytes read, words found, sentences finished, where something is to be asked, letters beyond the longest word
        state = np.array([0, 0, 0, -1, 0])
        while state[2] < len(ends):
            self._grow(word.nbytes)
            table = (self._slots, self._letters, self._ends)
            self._size = self.number_more(text, eights, ends, word, *table, self._size, state, numbers, word_ends)
        self.num_beyond = int(state[4])
        return numbers[: state[1]].copy(), word_ends

    def count(self, text: Array, ends: Array) -> dict[str, int]:
        """Counts how often every word of `text` occurs, for a table that has no words yet."""
        numbers, _ = self.number(text, ends)
        return dict(zip(self.words(), np.bincount(numbers, minlength=len(self)).tolist(), strict=True))

    def number_more(self, text: Array, eights: Array, ends: Array, *others: Any) -> int:
        """Numbers words until all sentences are done or the table must grow; returns its size by then."""
        return int(_number_words(text, eights, ends, self._forms, *others))

    def _grow(self, longest: int) -> None:
        """Makes room for one more word of at most `longest` bytes."""
        if self._size * 2 >= len(self._slots):
            self._slots = enlarge_table(self._slots, 2 * len(self._slots))
        self._ends = _make_room(self._ends, self._size + 1)
        self._letters = _make_room(self._letters, self.num_bytes + longest)


def spell_out(letters: Array, ends: Array, chosen: Array) -> list[str]:
    """Lists the chosen words of those whose letters end at `ends`."""
    text = letters.tobytes()
    starts = np.concatenate([[0], ends])[chosen]
    return [text[start:end].decode() for start, end in zip(starts.tolist(), ends[chosen].tolist(), strict=True)]


def _make_room(array: Array, needed: int) -> Array:
    """Returns the array, or a copy at least twice as large where it has no room for so many entries."""
    if needed <= len(array):
        return array
    larger = np.empty(max(needed, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


@compiled
def _measure_ideograph(text, at, stop):
    """Returns the size in bytes of the character at `at` if `tokenizers` sets it apart as Chinese, else 0."""
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
def _read_word(text, at, stop, forms, word):
    """Writes the next word of text[at:stop] into `word`; returns its size, 0 at the end, where to go on, and how many
    letters beyond LONGEST_WORD + 1 it has, which are not written."""
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
            if form == FOREIGN and not _measure_ideograph(text, at, stop):
                return (*_read_opaque_word(text, start, stop, forms, word), 0)
            break
        at += 1
    beyond = max(0, size - LONGEST_WORD - 1)
    if size == 0 and at < stop:  # at a mark or a Chinese character
        size = max(1, _measure_ideograph(text, at, stop))
        copy_items(word, 0, text, at, at + size)
        at += size
    return size - beyond, at, beyond


@compiled
def _read_opaque_word(text, start, stop, forms, word):
    """Writes the word that begins at `start` into `word` as it stands; returns its size and where to go on."""
    at = start
    while at < stop and forms[text[at]] not in (SPACE, MARK):
        if forms[text[at]] == FOREIGN and _measure_ideograph(text, at, stop):
            break
        at += 1
    copy_items(word, 0, text, start, at)
    return at - start, at


@compiled
def _scan_sixteen(low, high, fold):
    """Counts the bytes of letters and digits with which sixteen bytes begin, none of them Chinese.

    Returns their number, the sixteen bytes in lower case, and False; or the bytes as they are, and True, if some of the
    letters are not ASCII. Bytes behind the letters are not cleared.
    """
    size, small_low, foreign = _scan_eight(low, fold)
    small_high = high
    if size == 8:
        more, small_high, foreign_too = _scan_eight(high, fold)
        size += more
        foreign |= foreign_too
    if foreign:
        return size, low, high, True
    return size, small_low, small_high, False


@compiled
def _scan_eight(eight, fold):
    """Counts the bytes of letters and digits with which eight bytes begin.

    Returns their number, the eight bytes with the bits of `fold` set in letters, and a bit for each letter that is not
    ASCII. The kind of each byte is computed in its highest bit.
    """
    plain = eight & ~HIGHEST
    small = plain | SMALL
    letters = (small + FROM_A) & ~(small + BEYOND_Z) & ~eight & HIGHEST
    digits = (plain + FROM_0) & ~(plain + BEYOND_9) & ~eight & HIGHEST
    foreign = ~(plain + BEYOND_E2) & eight & HIGHEST
    others = (letters | digits | foreign) ^ HIGHEST
    first = others & (~others + np.uint64(1))  # the lowest bit that is set
    before = (first >> np.uint64(7)) - np.uint64(1)  # all bits of the bytes before that one
    size = ((before & EACH) * EACH) >> np.uint64(56)  # adds up a bit of each of them
    return np.int64(size), eight | (letters >> np.uint64(2) & fold), foreign & before


@compiled
def _measure_word(size, form, left, opaque):
    """Returns the size in bytes of the word here; 0 if there is none, -1 if it must be read byte by byte.

    `size` letters and digits stand here before a byte of the kind `form`; the sentence has `left` bytes more. A mark is
    a word of one byte. Words are read byte by byte that are long or may have Chinese or dropped characters, and ASCII
    words at the end of a sentence that seem opaque.
    """
    if size == 0:
        return 0 if form <= DROP else 1 if form == MARK else -1
    if size >= left:
        return -1 if left > SHORT or (opaque and size > left) else left
    return size if size <= SHORT and form != DROP and form != FOREIGN else -1


@compiled
def _number_words(text, eights, sentence_ends, forms, word, slots, letters, ends, num_words, state, numbers, word_ends):
    """Numbers words from `state` on until all sentences are done or the table must grow; returns its size by then.

    The way of most words is not in a function of its own: numba counts references to the arrays that are passed, which
    takes longer than finding a word.
    """
    at, count, sentence = state[0], state[1], state[2]
    fold = np.uint64(forms[ord("A")] ^ ord("A")) * EACH
    limit, room = min(slots.size // 2, ends.size), letters.size - 8 * word.size
    full = False
    while sentence < sentence_ends.size and not full:
        stop = sentence_ends[sentence]
        while at < stop and not full:
            size = -1
            if at + 16 < text.size:
                size, low, high, opaque = _scan_sixteen(eights[at].bytes, eights[at + 8].bytes, fold)
                form = forms[text[at + size]]
                size = _measure_word(size, form, stop - at, opaque)
            if size > 0:
                low, high = make_short_key(low, high, size)
                at += size + (form == SPACE)
            elif size == 0:
                at += 1
                continue
            else:
                size, at, beyond = _read_word(text, at, stop, forms, word.view(np.uint8))
                state[4] += beyond
                if size == 0:
                    break
                low, high = make_key(word, size)
            slot = find(slots, low, high)
            if slots[slot].high and size <= SHORT:
                numbers[count] = slots[slot].number
            else:
                numbers[count] = number_word(low, high, word, size, slots, letters, ends, num_words)
                if numbers[count] == num_words:
                    num_words += 1
                    full = num_words == limit or ends[num_words - 1] > room
            count += 1
        if at >= stop:
            word_ends[sentence] = count
            at = stop
            sentence += 1
    state[0], state[1], state[2] = at, count, sentence
    return num_words
