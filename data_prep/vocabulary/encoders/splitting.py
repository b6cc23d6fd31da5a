"""Normalises words that are not ASCII and splits them into parts, as `tokenizers` does, many at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unicodedata import category

import numpy as np
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from data_prep.common.arrays import Array

LONGEST_WORD = 100  # characters; WordPiece calls anything longer unknown
TOGETHER = 1000  # words that are normalised as one text
BAR = "|"  # stands between them: an opaque word has none, and no character becomes one
UNSEEN, SPACE, LETTER, MARK = range(4)  # kinds of characters
NO_PARTS = np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
UTF_32 = "utf-32-le"  # which has four bytes for every character


@dataclass(frozen=True)
class WordParts:
    """The parts of several words, one word after another."""

    letters: Array  # of all parts, one after another
    ends: Array  # (parts,) where every part ends in letters
    counts: Array  # (words,) how many parts every word has

    def __iter__(self) -> Iterator[list[str]]:
        """Yields the parts of each word."""
        text = self.letters.tobytes()
        spans = zip([0, *self.ends.tolist()], self.ends.tolist(), strict=False)
        parts = (text[start:end].decode() for start, end in spans)
        return (list(itertools.islice(parts, count)) for count in self.counts.tolist())


def cut_long_parts(parts: WordParts) -> WordParts:
    """Cuts parts that WordPiece would call unknown for their length, as those of scripts without blanks are, but not
    those in ASCII, which are data; the same object comes back where there are none."""
    characters = np.diff(np.cumsum(parts.letters & 0xC0 != 0x80)[parts.ends - 1], prepend=0)
    starts, cuts, ends = np.concatenate([[0], parts.ends]), np.ones(len(parts.ends), np.int64), list[int]()
    for number in np.flatnonzero(characters > LONGEST_WORD).tolist():
        text, end, at = parts.letters[starts[number] : parts.ends[number]].tobytes().decode(), int(starts[number]), 0
        while len(text) - at > LONGEST_WORD and not text.isascii():
            letters = (stop for stop in range(at + LONGEST_WORD, at, -1) if category(text[stop])[0] != "M")
            stop = next(letters, at + LONGEST_WORD)  # not before a mark that combines with a letter
            end += len(text[at:stop].encode())
            ends.append(end)
            cuts[number], at = cuts[number] + 1, stop
    if not ends:
        return parts
    total = np.concatenate([[0], np.cumsum(cuts)])[np.concatenate([[0], np.cumsum(parts.counts)])]
    return WordParts(parts.letters, np.sort(np.concatenate([parts.ends, ends])), np.diff(total))


class WordSplitter:
    """Splits opaque words, those of words.py that are not ASCII.

    `tokenizers` normalises them. Where it splits depends on single characters, so it is asked about each of these once.
    """

    def __init__(self, normalizer: Normalizer, pre_tokenizer: PreTokenizer) -> None:
        self._normalizer, self._pre_tokenizer = normalizer, pre_tokenizer
        self._kinds = np.full(0x110000, UNSEEN, np.uint8)  # of all characters
        self._kinds[ord(BAR)] = SPACE

    def split(self, words: Sequence[str]) -> WordParts:
        """Normalises and splits words, of which none has a BAR."""
        chunks = [words[first : first + TOGETHER] for first in range(0, len(words), TOGETHER)]
        letters, sizes, counts = zip(NO_PARTS, *map(self._split, chunks), strict=True)
        return WordParts(np.concatenate(letters), np.cumsum(np.concatenate(sizes)), np.concatenate(counts))

    def _split(self, words: Sequence[str]) -> tuple[Array, Array, Array]:
        """Splits words; returns the letters of all parts, the size of each part, and the number of parts per word."""
        text = self._normalizer.normalize_str(BAR.join(words) + BAR)
        codes = np.frombuffer(text.encode(UTF_32), np.uint32)
        kinds = self._kinds_of(codes)
        apart = np.concatenate([[True], kinds[:-1] != LETTER]) | (kinds == MARK)
        filled = kinds != SPACE
        number = np.cumsum(apart & filled)  # of the part that a character belongs to, from 1 on
        widths = 1 + (codes >= 1 << 7) + (codes >= 1 << 11) + (codes >= 1 << 16)
        sizes = np.bincount(number[filled], widths[filled], number[-1] + 1)[1:].astype(np.int64)
        letters = np.frombuffer(codes[filled].tobytes().decode(UTF_32).encode(), np.uint8)
        return letters, sizes, np.diff(number[codes == ord(BAR)], prepend=0)

    def _kinds_of(self, codes: Array) -> Array:
        """Classifies characters: white space, letter or mark."""
        for code in np.unique(codes[self._kinds[codes] == UNSEEN]).tolist():
            around = self._pre_tokenizer.pre_tokenize_str(f"a{chr(code)}a")
            self._kinds[code] = {1: LETTER, 2: SPACE, 3: MARK}[len(around)]
        return np.asarray(self._kinds[codes])
