"""Cuts sentences into ids of byte-level BPE equal to those of `tokenizers`, many times as fast.

A word is what GPT-2's pattern finds: a contraction such as `'s`; a run of letters, of digits or of other characters,
with the blank before it; or white space, of which a run leaves its last character to the word that follows. Words are
found in the bytes and numbered (words.py); merges are applied to a word when it is new. To which class a character
belongs is asked of `tokenizers`, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.common.hashing import FACTOR_1
from data_prep.vocabulary.encoders.encoder import Pieces
from data_prep.vocabulary.encoders.keys import SHORT, find, make_key, make_short_key, number_word
from data_prep.vocabulary.encoders.tables import CutWords, TableEncoder
from data_prep.vocabulary.encoders.words import WordTable, spell_out

UNSEEN, LETTER, DIGIT, OTHER, SPACE = range(5)  # classes of characters
BLANK, APOSTROPHE = ord(" "), ord("'")
BLOCK = 256  # characters that are asked about at a time
LONGEST = 96  # bytes of a word that is merged here, in time that grows with their square
FREE = np.uint64(0xFFFFFFFFFFFFFFFF)  # a key of no pair
MERGE = np.dtype([("pair", np.uint64), ("rank", np.int32), ("merged", np.int32)])
"""A merge: the ids of its left and its right piece, which merge it is (lower ones come first), and the merged piece."""
NO_MERGE = 1 << 62
PAIR_FACTOR = np.uint64(FACTOR_1)


class Characters:
    """The classes of characters by which GPT-2's pattern finds words."""

    def __init__(self) -> None:
        self.classes = np.full(0x110000, UNSEEN, np.uint8)
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
        self.classify(0)

    def classify(self, code: int) -> None:
        """Asks for the classes of a character and of those around it."""
        first = code - code % BLOCK
        for each in range(first, first + BLOCK):
            character = chr(each)
            if not 0xD800 <= each < 0xE000:
                self.classes[each] = self._ask(character)

    def _ask(self, character: str) -> int:
        (_, (_, end)), *others = self._split(f"a{character}1")
        if len(others) == 1 and character != " ":
            return LETTER if end == 2 else DIGIT
        return OTHER if len(self._split(f"a{character}!")) == 2 and character != " " else SPACE


open_characters = cache(Characters)
"""Returns the classes of characters, which are asked for once in a process."""


class SpacedWordTable(WordTable):
    """The distinct words that GPT-2's pattern finds, with their blanks."""

    def __init__(self) -> None:
        super().__init__(cased=True)
        self._characters = open_characters()

    def number_more(self, text: Array, eights: Array, ends: Array, *others: Any) -> int:
        """Numbers words until all sentences are done, the table must grow or the class of a character is asked for."""
        size = _number_words(text, eights, ends, self._characters.classes, *others)
        state = others[-3]
        if state[3] >= 0:
            self._characters.classify(ord(text[state[3] : state[3] + 4].tobytes().decode(errors="ignore")[0]))
            state[3] = -1
        return int(size)


class Merges(NamedTuple):
    """The merges of a vocabulary, found by their pairs in compiled code."""

    table: Array  # (slots,) of MERGE
    of_bytes: Array  # (256,) the ids of single bytes

    @classmethod
    def from_pieces(cls, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], letters: Sequence[str]) -> Merges:
        """Makes the table; `letters` are the pieces of single bytes. Of a pair that is there twice the last counts."""
        pairs = np.array([(ids[left], ids[right], ids[left + right]) for left, right in merges], np.int64)
        table = np.zeros(1 << (2 * len(merges) + 1).bit_length(), MERGE)
        table["pair"] = FREE
        _fill_merges(pairs.reshape(-1, 3), table)
        return cls(table, np.array([ids[letter] for letter in letters], np.int32))


class FastByteLevel(TableEncoder):
    """Encodes sentences as a pipeline of `tokenizers` would, looking at every distinct word once."""

    def __init__(
        self, pipeline: Tokenizer, merges: Merges, letters: Sequence[str], added: Sequence[str], prefix: bool
    ) -> None:
        """`added` are pieces that are found in a text before words are; `prefix`: a text gets a blank before it."""
        self._pipeline, self._merges, self._letters = pipeline, merges, letters
        self._added, self._prefix = [piece.encode() for piece in added], prefix
        super().__init__(SpacedWordTable)

    def encode(self, text: Array, ends: Array) -> Pieces:
        """Cuts the sentences of `text` into pieces; those that have added pieces in them are left to `tokenizers`."""
        with_added = self._find_added(text, ends)
        plain, plain_ends = self._normalize(text, ends) if self._pipeline.normalizer else (text, ends)
        if plain is not text:
            with_added = np.union1d(with_added, self._find_added(plain, plain_ends))
        if self._prefix and len(plain):
            first = plain[np.minimum(np.concatenate([[0], plain_ends[:-1]]), max(len(plain) - 1, 0))]
            plain, plain_ends = put_blanks(plain, plain_ends, first != BLANK)
        pieces = super().encode(plain, plain_ends)
        return self._replace(pieces, text, ends, with_added) if len(with_added) else pieces

    def _find_added(self, text: Array, ends: Array) -> Array:
        """Finds the sentences that have an added piece in them."""
        content, places = text.tobytes() if self._added else b"", []
        for piece in self._added:
            at = content.find(piece)
            while at >= 0:
                places.append(at)
                at = content.find(piece, at + 1)
        return np.unique(np.searchsorted(ends, places, side="right"))

    def _replace(self, pieces: Pieces, text: Array, ends: Array, numbers: Array) -> Pieces:
        """Replaces the pieces of some sentences by those that `tokenizers` finds."""
        rows = np.split(pieces.ids, pieces.ends[:-1])
        starts = np.concatenate([[0], ends])
        parts = [text[starts[number] : starts[number + 1]].tobytes().decode() for number in numbers.tolist()]
        found = self._pipeline.encode_batch(parts, add_special_tokens=False)
        for number, one in zip(numbers.tolist(), found, strict=True):
            rows[number] = np.array(one.ids, np.int32)
        return Pieces(np.concatenate(rows), np.cumsum([len(row) for row in rows]))

    def _normalize(self, text: Array, ends: Array) -> tuple[Array, Array]:
        """Normalises the sentences that have characters from U+0300 on; those below are normal, whatever follows."""
        numbers = np.unique(np.searchsorted(ends, np.flatnonzero(text >= 0xCC), side="right"))
        if not len(numbers):
            return text, ends
        rows, normalize = np.split(text, ends[:-1]), self._pipeline.normalizer.normalize_str
        for number in numbers.tolist():
            rows[number] = np.frombuffer(normalize(rows[number].tobytes().decode()).encode(), np.uint8)
        return np.concatenate(rows), np.cumsum([len(row) for row in rows], dtype=np.int64)

    def cut_words(self, letters: Array, ends: Array) -> CutWords:
        """Cuts words into pieces; `tokenizers` cuts those that are very long."""
        ids, stops = _merge_words(letters, ends, *self._merges)
        starts = np.concatenate([[0], stops[:-1]])
        long, more = np.flatnonzero(starts == stops), [ids]
        count = len(ids)
        for number, word in zip(long.tolist(), spell_out(letters, ends, long), strict=True):
            spelled = "".join(self._letters[byte] for byte in word.encode())
            found = [token.id for token in self._pipeline.model.tokenize(spelled)]
            starts[number], stops[number] = count, count + len(found)
            count += len(found)
            more.append(np.array(found, np.int32))
        return CutWords(np.concatenate(more), starts, stops)


@compiled
def put_blanks(text, ends, before):
    """Puts a blank before the sentences for which `before` says so; empty ones stay empty. Returns text and ends."""
    longer, longer_ends = np.empty(text.size + ends.size, np.uint8), np.empty(ends.size, np.int64)
    start, count = 0, 0
    for sentence in range(ends.size):
        if before[sentence] and ends[sentence] > start:
            longer[count] = BLANK
            count += 1
        copy_items(longer, count, text, start, ends[sentence])
        count += ends[sentence] - start
        start = ends[sentence]
        longer_ends[sentence] = count
    return longer[:count].copy(), longer_ends


@compiled
def _find_pair(table, pair):
    """Finds the slot of a pair, or the free one where it belongs."""
    last = table.size - 1
    slot = np.int64((pair * PAIR_FACTOR) >> np.uint64(32)) & last
    while table[slot].pair != FREE and table[slot].pair != pair:
        slot = (slot + 1) & last
    return slot


@compiled
def _fill_merges(pairs, table):
    """Fills the table with pairs (left, right, merged), whose order is that of the merges."""
    for rank in range(pairs.shape[0]):
        pair = np.uint64(pairs[rank, 0]) << np.uint64(32) | np.uint64(pairs[rank, 1])
        slot = _find_pair(table, pair)
        table[slot].pair, table[slot].rank, table[slot].merged = pair, rank, pairs[rank, 2]


@compiled
def _merge_words(letters, ends, table, of_bytes):
    """Merges the bytes of words; returns the ids, and where those of every word end. Very long words get none."""
    ids, stops = np.empty(letters.size, np.int32), np.empty(ends.size, np.int64)
    slots, ranks = np.empty(LONGEST, np.int64), np.empty(LONGEST, np.int64)
    count, start = 0, 0
    for number in range(ends.size):
        size = ends[number] - start
        if size <= LONGEST:
            for index in range(size):
                ids[count + index] = of_bytes[letters[start + index]]
            count += _merge_word(ids[count : count + size], slots, ranks, table)
        stops[number] = count
        start = ends[number]
    return ids[:count].copy(), stops


@compiled
def _merge_word(ids, slots, ranks, table):
    """Merges the pair of the lowest rank, the first of them, again and again; returns how many ids are left.

    `slots` and `ranks` are room for the merges of the pairs that begin at every place.
    """
    size = ids.size
    for at in range(size - 1):
        _find_merge(ids, at, slots, ranks, table)
    while size > 1:
        best = 0
        for at in range(1, size - 1):
            if ranks[at] < ranks[best]:
                best = at
        if ranks[best] == NO_MERGE:
            break
        ids[best] = table[slots[best]].merged
        size -= 1
        for at in range(best + 1, size):
            ids[at], slots[at - 1], ranks[at - 1] = ids[at + 1], slots[at], ranks[at]
        if best > 0:
            _find_merge(ids, best - 1, slots, ranks, table)
        if best < size - 1:
            _find_merge(ids, best, slots, ranks, table)
    return size


@compiled
def _find_merge(ids, at, slots, ranks, table):
    """Finds the merge of the pair of pieces that begins at `at`, and its rank; NO_MERGE if there is none."""
    slot = _find_pair(table, np.uint64(ids[at]) << np.uint64(32) | np.uint64(ids[at + 1]))
    slots[at] = slot
    ranks[at] = table[slot].rank if table[slot].pair != FREE else NO_MERGE


@compiled
def _classify(text, at, classes):
    """Returns the class of the character at `at`, and how many bytes it has."""
    lead = np.int64(text[at])
    if lead < 0x80:
        return classes[lead], 1
    low = np.int64(text[at + 1] & 0x3F)
    if lead < 0xE0:
        return classes[(lead & 0x1F) << 6 | low], 2
    low = low << 6 | np.int64(text[at + 2] & 0x3F)
    if lead < 0xF0:
        return classes[(lead & 0x0F) << 12 | low], 3
    return classes[(lead & 0x07) << 18 | low << 6 | np.int64(text[at + 3] & 0x3F)], 4


@compiled
def _measure_contraction(text, at, stop):
    """Returns the size of a contraction that begins with the apostrophe at `at`; 0 if there is none."""
    if at + 1 < stop and text[at + 1] in (115, 116, 109, 100):  # s, t, m, d
        return 2
    if at + 2 < stop:
        one, two = text[at + 1], text[at + 2]
        if (one == 114 and two == 101) or (one == 118 and two == 101) or (one == 108 and two == 108):  # re, ve, ll
            return 3
    return 0


@compiled
def _find_end(text, at, stop, kind, classes):
    """Finds where a run of characters of one class ends; -1 - place if the character there has no class yet."""
    while at < stop:
        other, width = _classify(text, at, classes)
        if other == UNSEEN:
            return -1 - at
        if other != kind:
            break
        at += width
    return at


@compiled
def _find_word_end(text, at, stop, classes):
    """Finds where the word ends that begins at `at`; -1 - place if the character there has no class yet."""
    if text[at] == APOSTROPHE:
        size = _measure_contraction(text, at, stop)
        if size > 0:
            return at + size
    kind, _ = _classify(text, at, classes)
    if kind == SPACE:
        end = _find_end(text, at, stop, SPACE, classes)
        if end < 0 or end == stop:
            return end
        last = end - 1
        while text[last] & 0xC0 == 0x80:
            last -= 1
        if last > at:
            return last
        if text[at] != BLANK:
            return end
        at = end
        kind, _ = _classify(text, at, classes)
    return _find_end(text, at, stop, kind, classes)


@compiled
def _number_words(
    text, eights, sentence_ends, classes, word, slots, letters, ends, num_words, state, numbers, word_ends
):
    """Numbers words from `state` on until all sentences are done, the table must grow or a character has no class.

    Returns the size of the table by then. Words of ASCII are found here, not in a function of its own: numba counts
    references to the arrays that are passed, which takes longer than finding a word.
    """
    at, count, sentence = state[0], state[1], state[2]
    limit, room = min(slots.size // 2, ends.size), letters.size - 8 * word.size
    full = False
    while sentence < sentence_ends.size and not full:
        stop = sentence_ends[sentence]
        while at < stop and not full:
            end = at + (text[at] == BLANK)
            kind = classes[text[end]] if end < stop and text[end] < 0x80 and text[at] != APOSTROPHE else SPACE
            while kind != SPACE and end < stop and text[end] < 0x80 and classes[text[end]] == kind:
                end += 1
            if kind == SPACE or (end < stop and text[end] >= 0x80):
                end = _find_word_end(text, at, stop, classes)
            if end < 0:
                state[3], full = -1 - end, True
                break
            size = end - at
            if size <= SHORT and at + 16 <= text.size:
                low, high = make_short_key(eights[at].bytes, eights[at + 8].bytes, size)
            else:
                copy_items(word.view(np.uint8), 0, text, at, end)
                low, high = make_key(word, size)
            at = end
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
