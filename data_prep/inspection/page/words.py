"""How a vocabulary cuts the words of a text, for the page of a folder: counted in a part of the documents in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError
from data_prep.inspection.page.lengths import Documents, KeptDocuments
from data_prep.vocabulary.vocabulary import Vocabulary

MOST_PIECES = 2_000_000
"""Pieces that are looked at, from all over the corpus."""
MOST_NUMBER = 6
"""Words of at least this number of pieces are counted together."""
LEAST, ONE_OF = 5, 100_000
"""A frequent word occurs at least LEAST times, and at least once in ONE_OF words."""
MOST_WORDS = 30


class Cut(NamedTuple):
    """How many words are cut into how many pieces."""

    name: str
    by_number: list[int]
    """How many words have one piece, two and so on; the last number counts those of MOST_NUMBER pieces or more."""
    unknown: int
    pieces: int
    """Pieces of all these words."""

    @property
    def words(self) -> int:
        """Counts all words."""
        return sum(self.by_number) + self.unknown

    @property
    def fertility(self) -> float:
        """Pieces for each word."""
        return self.pieces / max(1, self.words)

    def shares(self) -> list[float]:
        """The share of the words of one piece, of two and so on, and of those that are unknown."""
        return [count / max(1, self.words) for count in (*self.by_number, self.unknown)]


@dataclass(frozen=True)
class CutWord:
    """A word with its pieces."""

    word: str
    pieces: str
    number: int
    count: int


class Words(NamedTuple):
    """How the words of a part of the documents are cut."""

    documents: int
    total: Cut
    by_source: list[Cut]
    frequent: int
    """The least number of times that a word must occur to be listed."""
    most_cut: list[CutWord]


class _Found(NamedTuple):
    """The words of a text: the place of the first piece of each, its number of pieces, and whether it is unknown."""

    pieces: Array
    starts: Array
    sizes: Array
    unknown: Array

    @classmethod
    def from_pieces(cls, pieces: Array, vocabulary: Vocabulary, spelling: Array) -> _Found:
        """Finds the words; punctuation is none."""
        begins = ~vocabulary.continues[pieces]
        begins[:1] = True
        starts = np.flatnonzero(begins)
        sizes = np.diff(starts, append=len(pieces))
        is_word = spelling[pieces[starts]]
        starts, sizes = starts[is_word], sizes[is_word]
        return cls(pieces, starts, sizes, pieces[starts] == vocabulary.special.unk)

    def count_cuts(self, name: str) -> Cut:
        """Counts the words by their number of pieces."""
        sizes = np.minimum(self.sizes[~self.unknown], MOST_NUMBER)
        counts = np.bincount(sizes, minlength=MOST_NUMBER + 1)[1:].tolist()
        return Cut(name, counts, int(self.unknown.sum()), int(self.sizes.sum()))

    def most_cut(self, vocabulary: Vocabulary, least: int) -> Iterator[CutWord]:
        """Goes through the frequent words that are cut, those of the most pieces first, then the most frequent."""
        for number in np.unique(self.sizes[self.sizes > 1])[::-1].tolist():
            rows = self.starts[self.sizes == number]
            words, counts = np.unique(self.pieces[rows[:, None] + np.arange(number)], axis=0, return_counts=True)
            often = np.flatnonzero(counts >= least)
            for at in often[np.argsort(-counts[often], kind="stable")].tolist():
                ids = words[at].tolist()
                pieces = " ".join(vocabulary.spellings[id] for id in ids)
                yield CutWord(vocabulary.spell(ids), pieces, number, int(counts[at]))


def count_word_cuts(folder: Path, kept: KeptDocuments, vocabulary: Vocabulary) -> Words | None:
    """Counts how the words of documents from all over the corpus are cut; None where there are no documents."""
    each = MOST_PIECES // max(1, len(kept.sample))
    parts, documents = dict[str, list[Array]](), 0
    for one in kept.read_sample():
        pieces, begun = _beginning(one, each)
        if pieces.max(initial=0) >= len(vocabulary):
            raise DamageError(f"{folder}: its documents have a piece beyond its {vocabulary.file}")
        parts.setdefault(one.source, []).append(pieces)
        documents += begun
    if not documents:
        return None
    spelling = np.array([any(map(str.isalnum, piece)) for piece in vocabulary.spellings])
    texts = {source: np.concatenate(some) for source, some in parts.items()}
    found = _Found.from_pieces(np.concatenate(list(texts.values())), vocabulary, spelling)
    total = found.count_cuts("all")
    least = max(LEAST, total.words // ONE_OF)
    most_cut = list(islice(found.most_cut(vocabulary, least), MOST_WORDS))
    by_source = [_Found.from_pieces(text, vocabulary, spelling).count_cuts(source) for source, text in texts.items()]
    return Words(documents, total, by_source, least, most_cut)


def _beginning(documents: Documents, most: int) -> tuple[Array, int]:
    """Returns the pieces of the first sentences of a file, `most` at most, and the number of their documents."""
    number = np.searchsorted(documents.sentence_ends, most, side="right")
    end = int(documents.sentence_ends[number - 1]) if number else 0
    begun = int(np.searchsorted(documents.document_ends, end, side="left")) + 1 if end else 0
    return documents.pieces[:end], begun
