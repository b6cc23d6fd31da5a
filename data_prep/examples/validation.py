"""Holds documents out for validation, so that a model is measured on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.settings import count_held_out
from data_prep.vocabulary.tokens import scramble

Digests: TypeAlias = Callable[[], Iterable[Array]]  # goes through the digests of all documents, part by part
MOST_COPIES = 4  # copies of a text that are held out together even if fewer documents are wanted
MARGIN = 1000  # digests that are looked at beyond those that are likely needed
NUM_RANKS = 2.0**64


def choose_held_out(digests: Digests, num_documents: int, share: float, seed: int) -> Array:
    """Chooses the documents for validation by the digests of all documents; returns their numbers.

    They are those whose salted digests are smallest: copies of a text have one digest, so they are held out together
    and a text in validation is in no training example. A text with very many copies stays in training, unless all are
    such. Only the digests near the smallest are in memory, never those of all documents.
    """
    wanted = count_held_out(num_documents, share)
    if wanted < 1:
        return np.empty(0, np.int64)
    salt = np.uint64(seed)
    looked_at = 1.1 * wanted + MARGIN
    while True:
        everything = looked_at >= num_documents
        limit = np.uint64(2**64 - 1) if everything else np.uint64(int(looked_at / num_documents * NUM_RANKS))
        ranks, copies = _find_smallest(digests, limit, salt, wanted)
        chosen = _take_first_texts(ranks, copies, wanted, everything)
        if chosen is not None:
            break
        looked_at *= 4
    if everything:
        chosen = chosen[: len(ranks) - 1]  # something must be left to train on
    return _list_numbers(digests, chosen, salt) if len(chosen) else np.empty(0, np.int64)


def join_parts(parts: Iterable[Array], fewest: int) -> Iterator[Array]:
    """Joins arrays that follow each other until they have so many rows."""
    waiting, count = list[Array](), 0
    for part in parts:
        waiting.append(part)
        count += len(part)
        if count >= fewest:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _find_smallest(digests: Digests, limit: np.uint64, salt: np.uint64, wanted: int) -> tuple[Array, Array]:
    """Finds the different ranks up to a limit, and how many documents have each."""
    ranks, copies = np.empty(0, np.uint64), np.empty(0, np.int64)
    small = (here[here <= limit] for here in (_rank_digests(part, salt) for part in digests()))
    for some in join_parts(small, max(1 << 20, wanted)):
        fresh, counts = np.unique(some, return_counts=True)
        ranks, home = np.unique(np.concatenate([ranks, fresh]), return_inverse=True)
        copies = np.bincount(home, np.concatenate([copies, counts]), len(ranks)).astype(np.int64)
    return ranks, copies


def _take_first_texts(ranks: Array, copies: Array, wanted: int, everything: bool) -> Array | None:
    """Takes the texts of the smallest ranks until there are as many documents as wanted; None where more are needed."""
    few = copies <= max(wanted // 4, MOST_COPIES)
    if everything and not few.any():
        few = copies == copies.min()
    taken = np.cumsum(copies[few])
    if everything or (len(taken) and taken[-1] >= wanted):
        return np.asarray(ranks[few][: int(np.searchsorted(taken, wanted)) + 1])
    return None


def _list_numbers(digests: Digests, chosen: Array, salt: np.uint64) -> Array:
    """Lists the numbers of the documents that have the chosen ranks."""
    found, first = [np.empty(0, np.int64)], 0
    for part in digests():
        ranks = _rank_digests(part, salt)
        place = np.minimum(np.searchsorted(chosen, ranks), len(chosen) - 1)
        found.append(first + np.flatnonzero(chosen[place] == ranks))
        first += len(part)
    return np.concatenate(found)


@compiled
def _rank_digests(digests, seed):
    """Puts the digests in another order for every seed."""
    salt = scramble(seed)
    ranks = np.empty(digests.size, np.uint64)
    for document in range(digests.size):
        ranks[document] = scramble(digests[document] ^ salt)
    return ranks
