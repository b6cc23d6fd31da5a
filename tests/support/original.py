"""The original generator of training examples, as plainly as can be, to hold the compiled one against.

Documents are lists of sentences, sentences lists of pieces. Everything is done a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from scipy import stats

from data_prep.common.arrays import Array

SPECIAL_PIECES = 3  # [CLS] A [SEP] B [SEP]
CHANCE = 1e-3  # a right generator fails a comparison this often; the seeds are fixed, so it does so always or never


@dataclass
class Pair:
    """One example, before and after truncation."""

    document: int
    target: int
    num_sentences_a: int
    a: list[int]
    b: list[int]
    partner: int | None
    whole_a: list[int]
    whole_b: list[int]


def flatten(sentences: Iterable[list[int]]) -> list[int]:
    return [piece for sentence in sentences for piece in sentence]


def gather(sentences: Sequence[list[int]], wanted: int) -> Sequence[list[int]]:
    """Takes the first sentences until they have as many pieces as wanted or there are no more, but at least one."""
    size = 0
    for count, sentence in enumerate(sentences, 1):
        size += len(sentence)
        if size >= wanted:
            return sentences[:count]
    return sentences


def make_pairs(documents: Sequence[list[list[int]]], own: int, length: int, short: float, draw: Random) -> list[Pair]:
    """Makes the examples of one document."""
    room = length - SPECIAL_PIECES
    target = draw.randint(2, room) if draw.random() < short else room
    pairs = []
    left = documents[own]
    while left:
        gathered = gather(left, target)
        num_a = draw.randint(1, len(gathered) - 1) if len(gathered) > 1 else 1
        a = flatten(gathered[:num_a])
        partner = None
        if len(gathered) == 1 or draw.random() < 0.5:
            partner = draw_partner(len(documents), own, draw)
            start = draw.randint(0, len(documents[partner]) - 1)
            b = flatten(gather(documents[partner][start:], target - len(a)))
            left = left[num_a:]
        else:
            b = flatten(gathered[num_a:])
            left = left[len(gathered) :]
        pairs.append(Pair(own, target, num_a, *truncate(a, b, room, draw), partner, a, b))
    return pairs


def draw_partner(num_documents: int, own: int, draw: Random) -> int:
    for _ in range(10):
        partner = draw.randint(0, num_documents - 1)
        if partner != own:
            return partner
    return own


def truncate(a: list[int], b: list[int], room: int, draw: Random) -> tuple[list[int], list[int]]:
    """Drops single pieces of the longer part, from either end, until both fit."""
    a, b = list(a), list(b)
    while len(a) + len(b) > room:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if draw.random() < 0.5 else -1)
    return a, b


def words_of(pieces: Sequence[int], specials: set[int], continues: Sequence[bool] | Array) -> list[list[int]]:
    """Groups positions into words; one may reach from A over to B."""
    words: list[list[int]] = []
    for position, piece in enumerate(pieces):
        if piece in specials:
            continue
        if words and continues[piece]:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def mask(
    pieces: Sequence[int], words: list[list[int]], wanted: int, mask_piece: int, num_pieces: int, draw: Random
) -> tuple[list[int], dict[int, int]]:
    """Masks pieces of an example; returns it with what stood at the masked positions."""
    masked, labels = list(pieces), dict[int, int]()
    for word in draw.sample(words, len(words)):
        if len(labels) + len(word) > wanted:
            continue
        for position in word:
            labels[position] = pieces[position]
            if draw.random() < 0.8:
                masked[position] = mask_piece
            elif draw.random() < 0.5:
                masked[position] = draw.randint(0, num_pieces - 1)
    return masked, labels


def chance_alike(ours: Sequence[int] | Array, theirs: Sequence[int] | Array) -> float:
    """Says how likely two samples of whole numbers from one distribution differ as much as these, by chi-square."""
    both = np.concatenate([ours, theirs])
    edges = np.unique(np.quantile(both, np.linspace(0, 1, 21), method="higher"))
    table = np.array([np.bincount(np.searchsorted(edges, sample), minlength=len(edges)) for sample in (ours, theirs)])
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] == 1:
        return 1.0
    return float(stats.chi2_contingency(table).pvalue)
