"""Model inputs: texts cut into pieces and laid out as [CLS] A [SEP] or [CLS] A [SEP] B [SEP], in rows of different
lengths without padding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from data_prep.common.arrays import Array, ranges
from data_prep.vocabulary.encoders.encoder import TextEncoder
from data_prep.vocabulary.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, one after another."""

    values: Array  # (n, …)
    ends: Array  # (rows,) int64: where every row ends in `values`

    @classmethod
    def from_rows(cls, rows: Sequence[Array]) -> Ragged:
        """Concatenates arrays, at least one."""
        return cls(np.concatenate(rows), np.cumsum([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def from_table(cls, values: Array) -> Ragged:
        """Makes rows of a table (rows, length)."""
        rows, length = values.shape
        return cls(values.reshape(-1), length * np.arange(1, rows + 1, dtype=np.int64))

    @classmethod
    def join(cls, parts: Iterable[Ragged]) -> Ragged:
        """Concatenates the rows of several, at least one."""
        parts = list(parts)
        before = np.cumsum([0, *(len(part.values) for part in parts)])
        ends = [part.ends + offset for part, offset in zip(parts, before, strict=False)]
        return cls(np.concatenate([part.values for part in parts]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Array:
        return np.asarray(self.ends - self.lengths)

    @property
    def lengths(self) -> Array:
        lengths: Array = self.ends.copy()  # by `np.diff` it takes five times as long for a row
        lengths[1:] -= self.ends[:-1]
        return lengths

    def row(self, number: int) -> Array:
        return self.values[self.ends[number - 1] if number else 0 : self.ends[number]]

    def take(self, numbers: Array) -> Ragged:
        """Returns these rows, in this order."""
        return self.take_stretches(numbers, 0, self.lengths[numbers])

    def take_stretches(self, numbers: Array, begins: Array | int, ends: Array) -> Ragged:
        """Returns a slice of each of these rows, from `begins` up to `ends`."""
        lengths = ends - begins
        return Ragged(self.values[ranges(self.starts[numbers] + begins, lengths)], np.cumsum(lengths))


class Sequences(NamedTuple):
    """Sequences for the encoder: their pieces, and the start of each one's second segment."""

    pieces: Ragged
    second: Array  # (sequences,): the length of the sequence where it has one segment alone


@dataclass(frozen=True)
class Encoded:
    """Items of a task as model inputs."""

    sequences: Sequences
    labels: Ragged | None
    """The right outputs of every item: one class or number; 0 or 1 for each label; the first and the last piece of a
    span, counted from [CLS], (0, 0) for none; a tag for each word. None where unknown, as in a test split."""
    words: Ragged | None = None
    """For tags: the first piece of each tagged word, counted from [CLS]."""
    choices: int = 1
    """Sequences of an item, one after another."""
    kept: Callable[[Array], Tensor] | None = None
    """Reads the cached activations of items of the split, by their numbers."""

    def __len__(self) -> int:
        return len(self.sequences.pieces) // self.choices

    def take(self, numbers: Array) -> Encoded:
        """Returns these items, in this order."""
        if len(self) == len(numbers) == 1:
            return self
        rows = (numbers[:, None] * self.choices + np.arange(self.choices)).reshape(-1)
        pieces, second = self.sequences
        labels, words = (None if each is None else each.take(numbers) for each in (self.labels, self.words))
        return replace(self, sequences=Sequences(pieces.take(rows), second[rows]), labels=labels, words=words)


class Items(Protocol):
    """The items of a split, cut into pieces on demand."""

    def __len__(self) -> int: ...

    def encode(self, numbers: Array) -> Encoded:
        """Makes model inputs of the items with these numbers, in this order. A thread calls it in every epoch, for any
        items in any order."""
        ...


class Cutter:
    """Cuts texts into the pieces of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.special = vocabulary, vocabulary.special
        self._pipeline = vocabulary.text_pipeline()
        self._lock = threading.Lock()

    @cached_property
    def _fast(self) -> TextEncoder:
        """Made with the first text, since it compiles for a second."""
        return self.vocabulary.encoder()

    def cut_texts(self, texts: Sequence[str]) -> Ragged:
        """Cuts every text, and returns the ids of its pieces."""
        if not find_spec("numba"):  # as on a machine that only measures
            return self.cut_with_offsets(texts)[0]
        with self._lock:  # it remembers words
            pieces = self._fast.encode_texts(texts)
        return Ragged(pieces.ids, pieces.ends)

    def cut_words(self, words: Sequence[str]) -> Ragged:
        """Cuts every word, with the blank that a text has before it, and returns the ids of its pieces."""
        return self.cut_texts([f" {word}" for word in words] if self.vocabulary.has_blanks else words)

    def cut_with_offsets(self, texts: Sequence[str]) -> tuple[Ragged, Ragged]:
        """Cuts every text; returns the ids of its pieces, and where every piece begins and ends, in characters.

        Several times as slow as `cut_texts`.
        """
        encodings = self._pipeline.encode_batch(list(texts), add_special_tokens=False)
        ids = Ragged.from_rows([np.array(encoding.ids, np.int32) for encoding in encodings])
        return ids, Ragged.from_rows([np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings])

    def lay_out(self, first: Ragged, second: Ragged | None, length: int) -> Sequences:
        """Makes sequences of at most this length of texts, or of pairs of them, that were cut into pieces.

        Of a pair that is too long, the longer part loses pieces at its end until both have the same length, then both
        do, the second first, as in the original.
        """
        parts, between = ([first], 0) if second is None else ([first, second], self.vocabulary.separators)
        kept = _count_kept(parts, length - 2 - between)
        lengths = np.sum(kept, axis=0) + 2 + between
        ends = np.cumsum(lengths)
        pieces, begins = np.full(lengths.sum(), self.special.sep, np.int32), ends - lengths
        pieces[begins] = self.special.cls
        places = begins + 1
        for part, size in zip(parts, kept, strict=True):
            pieces[ranges(places, size)] = part.values[ranges(part.starts, size)]
            places = places + size + between
        return Sequences(Ragged(pieces, ends), kept[0] + 1 + max(1, between))


def _count_kept(parts: Sequence[Ragged], room: int) -> list[Array]:
    """Counts the pieces kept of each text, or of both texts of each pair, within `room` pieces together."""
    first, *others = (part.lengths for part in parts)
    if not others:
        return [np.minimum(first, room)]
    (second,) = others
    over = np.maximum(first + second - room, 0)
    from_longer = np.minimum(over, np.abs(first - second))
    rest = over - from_longer
    of_first = np.where(first > second, from_longer, 0) + rest // 2
    of_second = np.where(second > first, from_longer, 0) + rest - rest // 2
    return [first - of_first, second - of_second]
