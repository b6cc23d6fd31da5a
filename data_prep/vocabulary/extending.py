"""Adds words of the text to the vocabulary of a model that exists, so that they are no longer cut into many pieces.

The new pieces come behind the old ones, whose ids stay. They are whole words: those that occur most often times the
pieces that each would save. What the text becomes by that is counted with the longer vocabulary itself, since a new
piece also takes part in longer words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Vocabulary

LEAST = 5
"""Times that a word must occur: what is rarer teaches the model too little of its new piece."""
UNKNOWN = 0
WORDS_TOGETHER = 10_000
"""Words that are cut at a time, which bounds memory."""


@dataclass(frozen=True)
class Extension:
    """A vocabulary with new words, and what it does to the words that were counted."""

    vocabulary: Vocabulary
    added: tuple[str, ...]
    """The new words in the order of their ids: those that save most come first."""
    before: int
    """Pieces of the text whose words were counted, by the vocabulary as it was."""
    after: int
    """Pieces of the same text by the longer one."""

    def __str__(self) -> str:
        first, more = ", ".join(self.added[:10]), ", …" if len(self.added) > 10 else ""
        return (
            f"{len(self.added):,} words added to {len(self.vocabulary) - len(self.added):,} pieces: {first}{more}; "
            f"they make {self.before:,} pieces of text {self.after:,} ({self.after / self.before - 1:+.1%})"
        )


def extend_vocabulary(base: Vocabulary, counts: Mapping[str, int], number: int) -> Extension:
    """Adds the words that are cut most, as many as there are up to `number`, each as a piece of its own.

    A word that the vocabulary knows nothing of saves as many pieces as if it had been cut into its characters. A new
    piece may not make another word of the text unknown, whose rest no piece continues: it is left out then.
    """
    sizes = _count_pieces(base, counts)
    pieces = {word: size if size != UNKNOWN else max(len(word), 2) for word, size in sizes.items()}
    saved = {word: count * (pieces[word] - 1) for word, count in counts.items() if count >= LEAST}
    ranked = sorted((word for word in saved if saved[word]), key=lambda word: (-saved[word], word))
    refused: set[str] = set()
    while True:
        added = tuple(islice((word for word in ranked if word not in refused), number))
        if not added:
            raise UserError("--extend: no word of the text is worth a piece of its own; leave it out")
        longer = replace(base, pieces=(*base.pieces, *added))
        now, new = _count_pieces(longer, counts), set(added)
        lost = {_find_longest_start(word, new) for word, size in now.items() if size == UNKNOWN != sizes[word]}
        lost |= {word for word in added if now[word] != 1}  # the tokenizer normalises it into something else
        if not lost:
            break
        refused |= lost
    before, after = (sum(counts[word] * max(size, 1) for word, size in each.items()) for each in (sizes, now))
    return Extension(longer, added, before, after)


def _count_pieces(vocabulary: Vocabulary, words: Iterable[str]) -> dict[str, int]:
    """Counts the pieces of every word; `UNKNOWN` for a word that becomes an unknown one."""
    pipeline, given, sizes = vocabulary.pipeline(), sorted(words), {}
    unknown = vocabulary.special_pieces.unk
    for first in range(0, len(given), WORDS_TOGETHER):
        some = given[first : first + WORDS_TOGETHER]
        for word, encoding in zip(some, pipeline.encode_batch(some, add_special_tokens=False), strict=True):
            pieces = encoding.tokens
            sizes[word] = UNKNOWN if unknown in pieces else len(pieces)
    return sizes


def _find_longest_start(word: str, added: Collection[str]) -> str:
    """Finds the longest new piece that a word begins with, the one by which it is cut now."""
    return next(word[:size] for size in range(len(word), 0, -1) if word[:size] in added)
