"""Mixtures: which corpus each sequence of a phase comes from, a pure function of the phase's shares and the index.

Slot n, the place of the n-th sequence, goes to one corpus, so that after any number of slots each corpus has had less
than one sequence more or fewer than its share: the chairman assignment of Tijdeman (1980). The shares are integers, in
millionths; all arithmetic is exact. Within a corpus the order is that of `order.py`, from phase to phase.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.hashing import hash_key
from data_prep.common.progress import join_first
from pretraining.data.corpora import Corpora
from pretraining.data.order import Examples, Order, permute_places

WHOLE = 1_000_000
"""The sum of the shares of a phase, and the size of the chunks that slots are kept in: shares that stay the same repeat
their slots after so many."""
STRETCH = 1000
"""Slots between marks, where the sequences of each corpus are known; stairs of a long phase have a multiple of them."""
FEWEST_STAIRS, MOST_STAIRS = 10, 10_000
"""The fewest stairs in which shares move, in a phase of so many sequences, and the most."""
NEVER = (1 << 63) - 1
"""The number of a slot that never comes."""


def divide_whole(weights: Any, whole: int) -> Array:
    """Divides a whole number in proportion to weights by largest remainder; rows of weights each by themselves."""
    weights = np.asarray(weights)
    exact = weights * whole if weights.dtype.kind == "i" else weights * float(whole)
    total = weights.sum(-1, keepdims=True)
    parts = np.floor_divide(exact, total).astype(np.int64)
    rest = whole - parts.sum(-1, keepdims=True)
    rank = np.argsort(np.argsort(parts * total - exact, axis=-1, kind="stable"), axis=-1, kind="stable")
    divided: Array = parts + (rank < rest)
    return divided


@dataclass(frozen=True)
class Mixture:
    """The corpora that a phase reads, and their shares of its sequences."""

    corpora: Corpora
    length: int
    """length of the phase"""
    first: tuple[int, ...]
    """shares at the beginning of the phase, in millionths"""
    last: tuple[int, ...]
    """shares at its end; the same unless they move"""

    @classmethod
    def choose(
        cls,
        corpora: Corpora,
        length: int,
        mix: Mapping[str, float] | None = None,
        last_mix: Mapping[str, float] | None = None,
        temperature: float | None = None,
    ) -> Mixture:
        """Chooses the shares of a phase of this length: those of `mix`. Without it, or if it names none of these
        corpora (in a phase that is done), they follow the numbers of examples to the power of a `temperature`.
        Corpora without a share are left out."""
        counts = [part.count_examples(length) for part in corpora.parts]
        sizes = [count and count ** (1.0 if temperature is None else temperature) for count in counts]
        sizes = sizes if any(sizes) else [1.0] * len(counts)
        first = sizes if mix is None else [mix.get(part.name, 0.0) for part in corpora.parts]
        last = first if last_mix is None else [last_mix.get(part.name, 0.0) for part in corpora.parts]
        shares = np.stack([divide_whole(1.0 * np.array(each if any(each) else sizes), WHOLE) for each in (first, last)])
        read = np.flatnonzero(shares.any(axis=0))
        chosen = corpora.select({corpora.parts[index].name for index in read})
        return cls(chosen, length, tuple(shares[0, read].tolist()), tuple(shares[1, read].tolist()))

    @property
    def names(self) -> list[str]:
        """Names of the corpora that are read."""
        return [part.name for part in self.corpora.parts]

    @property
    def mean(self) -> Array:
        """Mean shares over the phase; they sum to 1."""
        shares: Array = (np.array(self.first) + self.last) / (2 * WHOLE)
        return shares

    @cached_property
    def examples(self) -> Array:
        """Training examples of a duplicate of each corpus; infinite where it has none of the length, so that nothing is
        read of it."""
        return np.array([part.count_examples(self.length) or np.inf for part in self.corpora.parts])

    @cached_property
    def pieces(self) -> Array:
        """Mean numbers of pieces of an example of each corpus."""
        return np.array([part.measure_pieces(self.length) for part in self.corpora.parts])

    def describe(self, sequences: Array, epochs: Array | None = None) -> str:
        """Describes each corpus in one line: its share of these sequences and of their pieces, and its epochs if they
        are given. The corpora with most sequences come first."""
        pieces, told = sequences * self.pieces, []
        for number in np.argsort(-sequences, kind="stable"):
            shares = sequences[number] / sequences.sum(), pieces[number] / pieces.sum()
            known = "" if epochs is None else f", {epochs[number]:.2f} epochs"
            ends = [f"{each[number] / WHOLE:.1%}" for each in (self.first, self.last)]
            moves = f" (from {' to '.join(ends)})" * (ends[0] != ends[1])
            said = f"{self.names[number]} {shares[0]:.1%} of the sequences{moves}"
            told.append(f"{said}, {shares[1]:.1%} of the pieces{known}")
        return join_first(told, "; ")

    def make_slots(self, sequences: int | None) -> Slots:
        """Makes the slots of a phase of so many sequences, over which the shares move; None if they stay."""
        first, last = np.array(self.first), np.array(self.last)
        if sequences is None or (first == last).all():
            return Slots(first[None], NEVER)
        width = min(-(-sequences // (STRETCH * MOST_STAIRS)) * STRETCH, max(1, sequences // FEWEST_STAIRS))
        count = -(-sequences // width)
        turns = 2 * np.arange(count)[:, None] + 1  # the middle of each stair, in halves of a stair
        return Slots(divide_whole(first * (2 * count - turns) + last * turns, WHOLE), width)


class Slots:
    """The corpora of the sequences of a phase, without end. Where shares move, the first look at a slot takes time that
    grows with the number of slots before it, times that of the corpora."""

    def __init__(self, shares: Array, width: int) -> None:
        """`shares` has a row for each stair of `width` slots; the last one stays for ever."""
        self._shares, self._width = np.ascontiguousarray(shares, np.int64), width
        self._starts = np.concatenate([0 * shares[:1], np.cumsum(shares[:-1] * width, axis=0)]).astype(np.int64)
        self._begins = {0: np.zeros(shares.shape[1], np.int64)}
        """sequences of each corpus before a chunk"""
        self._chunk = lru_cache(maxsize=3)(self._assign)

    def take(self, start: int, count: int) -> Array:
        """Returns the number of the corpus of each of the slots start … start+count-1."""
        parts = []
        while count:
            number, first = divmod(start, WHOLE)
            parts.append(self._find_chunk(number)[0][first : first + count])
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int16)

    def count(self, stop: int) -> Array:
        """Counts the sequences of each corpus in the slots before `stop`."""
        number, rest = divmod(stop, WHOLE)
        chosen, marks = self._find_chunk(number)
        stretch = rest // STRETCH
        own = np.bincount(chosen[stretch * STRETCH : rest], minlength=self._shares.shape[1])
        repeated = number * self._shares[0] if len(self._shares) == 1 else 0
        counts: Array = marks[stretch] + own + repeated
        return counts

    def _find_chunk(self, number: int) -> tuple[Array, Array]:
        """Finds a chunk: the corpora of its slots, and the sequences of each corpus before each of its stretches."""
        if len(self._shares) == 1:  # after WHOLE slots each corpus has had its exact share, and all begins again
            return self._chunk(0)
        for before in range(max(each for each in list(self._begins) if each <= number), number):
            self._chunk(before)
        return self._chunk(number)

    def _assign(self, number: int) -> tuple[Array, Array]:
        counts = self._begins[number].copy()
        chosen = np.empty(WHOLE, np.int16)
        marks = np.empty((WHOLE // STRETCH, len(counts)), np.int64)
        _load_assignment()(self._shares, self._starts, self._width, number * WHOLE, counts, chosen, marks)
        self._begins[number + 1] = counts
        return chosen, marks


@lru_cache(maxsize=1)
def _load_assignment() -> Callable[..., None]:
    """Compiles the loop over slots; numba is loaded by runs with several corpora alone."""
    from data_prep.common.compiled import compiled

    return compiled(_assign_slots)


def _assign_slots(shares, starts, width, base, counts, chosen, marks):  # type: ignore[no-untyped-def]
    """Assigns slots in turn to the corpus with the earliest deadline among those that may have one.

    After slot n, counted from 1, the sum of the shares of a corpus is T(n). With c sequences so far, it may have the
    next one when T(n) - c reaches 1/(2k-2) for k corpora, and must have it in the last slot in which T(n) - c is at
    most 1 - 1/(2k-2). Tijdeman proves that this can be kept; of jobs of one slot, the earliest deadline first keeps
    whatever can be. The sequences before each stretch of slots are written to `marks`.
    """
    corpora, stairs = shares.shape[1], shares.shape[0]
    margin = -(-WHOLE // max(2, 2 * corpora - 2))
    slots = np.empty((2, corpora), np.int64)  # the first slot, and the first that is too late
    stair = np.zeros((2, corpora), np.int64)
    renewed = -1
    for index in range(-1, len(chosen)):
        if index >= 0:
            number = base + index + 1
            if index % STRETCH == 0:
                marks[index // STRETCH] = counts
            renewed, earliest = 0, NEVER
            for corpus in range(corpora):
                if slots[0, corpus] <= number and slots[1, corpus] < earliest:
                    renewed, earliest = corpus, slots[1, corpus]
            chosen[index] = renewed
            counts[renewed] += 1
        for corpus in range(corpora):
            if index >= 0 and corpus != renewed:
                continue
            for which in range(2):
                wanted = counts[corpus] * WHOLE + (margin if which == 0 else WHOLE + 1 - margin)
                at = stair[which, corpus]
                while at + 1 < stairs and starts[at + 1, corpus] < wanted:
                    at += 1
                stair[which, corpus] = at
                share = shares[at, corpus]
                left = wanted - starts[at, corpus]
                slots[which, corpus] = at * width + (left + share - 1) // share if share else NEVER


class MixedOrder:
    """The order of the examples of a phase that reads several corpora; it has the methods of `Order` that phases use.

    The sets of all corpora are numbered one after another, as in a `Dataset`.
    """

    def __init__(
        self, seed: int, slots: Slots, orders: Sequence[Order], firsts: Sequence[int], offsets: Sequence[int]
    ) -> None:
        """`seed` is that of random draws. Of each corpus: its order, the number of its first set, and its sequences in
        earlier phases."""
        self.seed = seed
        self._slots, self._orders, self._firsts, self._offsets = slots, orders, firsts, np.array(offsets, np.int64)
        slots.take(0, 1)  # compiles in this thread

    def examples(self, start: int, count: int) -> Examples:
        """Returns the examples with the indices start … start+count-1."""
        chosen, begins = self._slots.take(start, count), self._offsets + self._slots.count(start)
        counts, parts = np.bincount(chosen), []
        for corpus in np.flatnonzero(counts).tolist():
            for places in self._orders[corpus].find_places(int(begins[corpus]), int(counts[corpus])):
                parts.append(places._replace(duplicate=places.duplicate + self._firsts[corpus]))
        return permute_places(parts).take(np.argsort(np.argsort(chosen, kind="stable")))

    def count(self, stop: int) -> Array:
        """Counts the sequences of each corpus among the first `stop` of the phase."""
        return self._slots.count(stop)


def make_corpus_order(seed: int, name: str, stored: int, rows: tuple[tuple[int, ...], ...]) -> Order:
    """Makes the order of a corpus, in which all phases of a run that read its examples of this length go on."""
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return Order(int(hash_key(seed, word, stored)[0]), rows)
