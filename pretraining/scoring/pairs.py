"""Minimal pairs: an acceptable sentence and an unacceptable one that differs from it in one point of grammar.

A model should find the acceptable one likelier. A file of pairs is a table (JSON lines, TSV, CSV, Parquet; compressed
or not) with the columns `good` and `bad` and optionally `paradigm` and `phenomenon`, as in BLiMP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.readers.tables import read_table
from pretraining.scoring.sentences import Sentences

CHANCE = 0.5
"""The accuracy of a model that knows nothing."""


class Pair(NamedTuple):
    """An acceptable and an unacceptable sentence."""

    good: str
    bad: str
    paradigm: str = ""
    phenomenon: str = ""


@dataclass(frozen=True)
class PairCount:
    """The number of pairs, and of those that a model gets right."""

    right: int
    pairs: int

    @classmethod
    def from_scores(cls, scores: Array) -> PairCount:
        """Counts pairs by the scores (pairs, 2) of both sentences, without those that lack one."""
        scored = np.isfinite(scores).all(axis=1)
        return cls(int((are_right(scores) & scored).sum()), int(scored.sum()))

    @property
    def accuracy(self) -> float:
        return self.right / self.pairs


@dataclass(frozen=True)
class Asked:
    """The number of pairs that a model is scored on, and of those that cannot tell models apart."""

    pairs: int
    equal: int
    """pairs of two equal sentences"""
    too_long: int
    """pairs with more pieces in a sentence than the model has positions"""
    without_pieces: int
    """other pairs with a sentence without pieces"""
    telling: int
    """pairs that a model can get right"""
    longest: int
    """the positions of the model"""

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair], cut: Sentences, longest: int) -> Asked:
        """Counts these pairs; `cut` has their sentences in pieces."""
        too_long = (cut.lengths.reshape(-1, 2) > longest).any(axis=1)
        scored = cut.have_scores(longest).reshape(-1, 2).all(axis=1)
        equal = np.array([pair.good == pair.bad for pair in pairs], bool)
        return cls(
            pairs=len(pairs),
            equal=int(equal.sum()),
            too_long=int(too_long.sum()),
            without_pieces=int((~scored & ~too_long).sum()),
            telling=int((scored & ~equal).sum()),
            longest=longest,
        )

    def list_doubts(self) -> Iterator[str]:
        """Lists lines on pairs without a score, and on others that cannot be right."""
        counts = (
            (f"with more than {self.longest} pieces in a sentence", self.too_long, "are left out"),
            ("with no piece in a sentence", self.without_pieces, "are left out"),
            ("of two equal sentences", self.equal, "count as wrong"),
        )
        return (f"pairs {which}: {count:,}; they {fate}" for which, count, fate in counts if count)

    def require_telling(self, where: str) -> None:
        """Raises UserError if no pair can be right."""
        if not self.telling:
            doubts = "\n".join([f"none of its {self.pairs:,} pairs says anything of this model", *self.list_doubts()])
            raise UserError(f"{where}: {doubts}\nname a file with other pairs, or a model with more positions")


def read_pairs(path: Path) -> list[Pair]:
    """Reads a file of pairs; raises UserError with file and line for an empty sentence."""
    table = read_table(path)
    sentences = [table.read_texts(name, f"the {name} sentence is empty") for name in ("good", "bad")]
    nameless = [""] * len(table)
    groups = [table.column(name) if name in table.names else nameless for name in ("paradigm", "phenomenon")]
    return list(map(Pair, *sentences, *groups))


def take_pairs(pairs: Iterable[Pair], count: int) -> list[Pair]:
    """Takes the first `count` pairs of each paradigm."""
    seen: Counter[str] = Counter()
    taken = []
    for pair in pairs:
        seen[pair.paradigm] += 1
        taken += [pair] if seen[pair.paradigm] <= count else []
    return taken


def list_sentences(pairs: Sequence[Pair]) -> list[str]:
    """Lists the good and the bad sentence of every pair, pair by pair."""
    return [sentence for pair in pairs for sentence in (pair.good, pair.bad)]


def are_right(scores: Array) -> Array:
    """Whether the good sentence of each pair has the higher score, of (pairs, 2); a tie is wrong."""
    return scores[:, 0] > scores[:, 1]


def count_right(names: Sequence[str], scores: Array) -> dict[str, PairCount]:
    """Counts right pairs by name, such as their paradigm, in the order of first appearance, without unscored pairs."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    found = {name: PairCount.from_scores(scores[own]) for name, own in places.items()}
    return {name: count for name, count in found.items() if count.pairs}
