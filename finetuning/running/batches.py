"""The batches of a task: slices of a permutation that is a function of seed and epoch.

Batches are not grouped by length: nothing is padded, so that this would save nothing, and where length correlates with
the class, a batch of equal lengths would have one class alone. Within a batch, items are sorted by length and dealt in
turns to ranks and micro-batches, so that all have equal work. A thread cuts the items of `WINDOW` batches into pieces
while the model computes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from data_prep.common.arrays import Array, ranges
from data_prep.common.hashing import hash_key
from finetuning.inputs import Encoded, Items
from finetuning.model.heads import TaskBatch
from finetuning.settings import FineTuning
from pretraining.model.batch import CPU, StepBatches
from pretraining.processes.ahead import prepare_in_thread

RULE = "stretches of a permutation"
"""Names this rule of drawing batches; a run cannot continue with another one."""
WINDOW = 64
"""Batches whose items are cut into pieces together."""
EVALUATED_TOGETHER = 4096
"""Items that evaluation sorts by length together."""
FEW = 64
"""The number of items up to which no thread is started, since starting one takes longer than packing them."""
PIECES = 8192
"""Maximum pieces of a batch in evaluation, unless one item has more."""


@dataclass(frozen=True)
class TaskBatches(StepBatches[TaskBatch]):
    """The micro-batches of a rank in a step, and the divisors of their loss."""

    labels: int
    """Labels of the global batch: classes, words, or all 0s and 1s."""
    predictions: int
    """Pieces of the global batch but the first of each sequence."""


class TrainingBatches:
    """This rank's batches of a run."""

    def __init__(self, items: Items, settings: FineTuning, rank: int = 0, ranks: int = 1) -> None:
        self._items, self._batch, self._micro_batch = items, settings.batch, settings.micro_batch
        self._seed, self._rank, self._ranks = settings.seed, rank, ranks
        self._evaluations = settings.evaluations
        self.steps_per_epoch = -(-len(items) // settings.batch)
        self.steps = max(1, round(settings.epochs * self.steps_per_epoch))

    def ends_stretch(self, step: int) -> bool:
        """Tells whether dev is scored after this step: evenly spaced in every epoch, and at the end."""
        within = (step - 1) % self.steps_per_epoch
        ends = within * self._evaluations // self.steps_per_epoch
        return step > 0 and (step == self.steps or (within + 1) * self._evaluations // self.steps_per_epoch > ends)

    def iterate(self, step: int, device: torch.device = CPU) -> Generator[tuple[TaskBatches, float], None, None]:
        """Yields the batches from this step on, pinned for the device, each with the seconds spent waiting for it.
        Close the generator to stop its thread."""
        return prepare_in_thread((batches.pin_for(device) for batches in self._make_batches(step)), WINDOW)

    def _make_batches(self, step: int) -> Iterator[TaskBatches]:
        while step < self.steps:
            epoch, within = divmod(step, self.steps_per_epoch)
            order = np.random.default_rng(hash_key(self._seed, epoch)).permutation(len(self._items))
            for window in range(within // WINDOW, -(-self.steps_per_epoch // WINDOW)):
                numbers = order[window * WINDOW * self._batch : (window + 1) * WINDOW * self._batch]
                encoded = self._items.encode(numbers)
                batches = divide_into_batches(encoded, self._batch)
                for chosen in batches[within - window * WINDOW :] if window == within // WINDOW else batches:
                    if step == self.steps:
                        return
                    yield self._take_share(encoded, chosen, numbers)
                    step += 1

    def _take_share(self, encoded: Encoded, chosen: Array, numbers: Array) -> TaskBatches:
        """Takes this rank's micro-batches of a global batch. All ranks have the same number, some perhaps without
        labels, since every micro-batch has collective operations."""
        largest = -(-len(chosen) // self._ranks)
        count = -(-largest // (self._micro_batch or largest))
        mine = chosen[self._rank :: self._ranks]
        parts = [mine[number::count] for number in range(count)]
        stand_in = partial(pack, encoded, chosen[:1], numbers, labelled=False)
        micro = tuple(pack(encoded, part, numbers) if len(part) else stand_in() for part in parts)
        assert encoded.labels is not None, "nothing can be learned without labels"
        sequences = len(chosen) * encoded.choices
        predictions = int(count_pieces(encoded)[chosen].sum()) - sequences
        return TaskBatches(micro, sequences, int(encoded.labels.lengths[chosen].sum()), predictions)


def count_pieces(encoded: Encoded) -> Array:
    """Counts the pieces of every item."""
    return np.asarray(encoded.sequences.pieces.lengths.reshape(-1, encoded.choices).sum(1))


def divide_into_batches(encoded: Encoded, batch: int) -> list[Array]:
    """Divides items into consecutive batches, each sorted by length."""
    lengths = count_pieces(encoded)
    batches = np.split(np.arange(len(lengths)), np.arange(batch, len(lengths), batch))
    return [chosen[np.argsort(lengths[chosen], kind="stable")] for chosen in batches]


def make_evaluation_batches(items: Items, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Array, TaskBatch]]:
    """Yields this rank's batches of all items, each with its items' numbers. Every rank has the same number of batches;
    the last one may be repeated."""
    batches = _make_evaluation_batches(items, rank, ranks)
    return batches if len(items) <= FEW else (batch for batch, _ in prepare_in_thread(batches, WINDOW))


def encode_in_order(items: Items) -> Iterator[tuple[Array, Encoded]]:
    """Encodes all items in their order, some thousands at a time; yields their numbers too."""
    for begin in range(0, len(items), EVALUATED_TOGETHER):
        numbers = np.arange(begin, min(begin + EVALUATED_TOGETHER, len(items)))
        yield numbers, items.encode(numbers)


def _make_evaluation_batches(items: Items, rank: int, ranks: int) -> Iterator[tuple[Array, TaskBatch]]:
    for numbers, encoded in encode_in_order(items):
        lengths = count_pieces(encoded)
        batches = split_by_pieces(np.argsort(-lengths, kind="stable"), lengths)
        for first in range(0, len(batches), ranks):
            chosen = batches[min(first + rank, len(batches) - 1)]
            yield numbers[chosen], pack(encoded, chosen, numbers)


def split_by_pieces(order: Array, lengths: Array) -> list[Array]:
    """Divides items in this order into batches of at most `PIECES` pieces, or one item."""
    batches, begin, pieces = [], 0, 0
    for place, length in enumerate(lengths[order].tolist()):
        if pieces and pieces + length > PIECES:
            batches.append(order[begin:place])
            begin, pieces = place, 0
        pieces += length
    return [*batches, order[begin:]]


def pack(encoded: Encoded, chosen: Array, numbers: Array | None = None, labelled: bool = True) -> TaskBatch:
    """Packs the chosen items into a batch; `numbers` maps encoded items to items of the split."""
    taken = encoded.take(chosen)
    pieces, second = taken.sequences
    lengths, ends = pieces.lengths, pieces.ends
    positions = ranges(np.zeros_like(lengths), lengths)
    labels = taken.labels if labelled else None
    words, words_of_items = np.empty(0, np.int64), np.empty(0, np.int64)
    if taken.words is not None:
        words_of_items = taken.words.lengths
        words = taken.words.values + np.repeat(ends - lengths, words_of_items)
    own = chosen if numbers is None else numbers[chosen]
    examples = np.stack([np.repeat(own, taken.choices), np.tile(np.arange(taken.choices), len(own))], 1)
    return TaskBatch(
        pieces=torch.from_numpy(pieces.values.astype(np.int64)),
        segments=torch.from_numpy((positions >= np.repeat(second, lengths)).astype(np.int64)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        lengths=tuple(lengths.tolist()),
        examples=examples,
        labels=None if labels is None else torch.from_numpy(np.ascontiguousarray(labels.values)),
        words=torch.from_numpy(words),
        words_of_items=tuple(words_of_items.tolist()),
        choices=taken.choices,
        kept=None if taken.kept is None else partial(taken.kept, own),
    )
