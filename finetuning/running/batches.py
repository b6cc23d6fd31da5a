"""The batches of a task: stretches of an order that is a function of seed and epoch.

Batches are not grouped by length. That would save nothing here, where nothing is padded; and where lengths tell classes
apart, a batch of like lengths has one class, from which a model learns little but to answer that class. Within a batch,
items are sorted by length and dealt out in turns to ranks and micro-batches, so that all have equal work. The items of
`WINDOW` batches are cut into pieces at once, by a thread, while the model is at work.
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
from pretraining.processes.ahead import in_thread

RULE = "stretches of a permutation"
"""Tells these batches from those of another rule, by which a run that was begun cannot go on."""
WINDOW = 64
"""Batches whose items are cut into pieces at once."""
EVALUATED_TOGETHER = 4096
"""Items that are sorted by length for evaluation."""
FEW = 64
"""Items that are cut and packed in less time than a thread takes to begin."""
PIECES = 8192
"""Pieces of a batch in evaluation, at least one item."""


@dataclass(frozen=True)
class TaskBatches(StepBatches[TaskBatch]):
    """The micro-batches of a rank in a step, and what their loss is divided by."""

    labels: int
    """Labels of the global batch: classes, words, or all 0s and 1s."""
    predictions: int
    """Pieces of the global batch that have others before them."""


class TrainingBatches:
    """This rank's batches of a run, from a step on."""

    def __init__(self, items: Items, settings: FineTuning, rank: int = 0, ranks: int = 1) -> None:
        self._items, self._batch, self._micro_batch = items, settings.batch, settings.micro_batch
        self._seed, self._rank, self._ranks = settings.seed, rank, ranks
        self._evaluations = settings.evaluations
        self.steps_per_epoch = -(-len(items) // settings.batch)
        self.steps = max(1, round(settings.epochs * self.steps_per_epoch))

    def ends_stretch(self, step: int) -> bool:
        """Whether dev is scored after so many steps: evenly in every epoch, and at the end."""
        within = (step - 1) % self.steps_per_epoch
        ends = within * self._evaluations // self.steps_per_epoch
        return step > 0 and (step == self.steps or (within + 1) * self._evaluations // self.steps_per_epoch > ends)

    def iterate(self, step: int, device: torch.device = CPU) -> Generator[tuple[TaskBatches, float], None, None]:
        """The batches of this step and all later ones in memory that suits the device, each with the seconds for which
        it was waited; close it to stop the thread behind it."""
        return in_thread((batches.pin_for(device) for batches in self._make_batches(step)), WINDOW)

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
        """This rank's micro-batches of a global batch. All ranks have as many, though some may have nothing to learn:
        ranks meet in every one of them."""
        largest = -(-len(chosen) // self._ranks)
        count = -(-largest // (self._micro_batch or largest))
        mine = chosen[self._rank :: self._ranks]
        parts = [mine[number::count] for number in range(count)]
        micro = tuple(
            pack(encoded, part, numbers) if len(part) else pack(encoded, chosen[:1], numbers, labelled=False)
            for part in parts
        )
        assert encoded.labels is not None, "nothing can be learned without labels"
        sequences = len(chosen) * encoded.choices
        predictions = int(count_pieces(encoded)[chosen].sum()) - sequences
        return TaskBatches(micro, sequences, int(encoded.labels.lengths[chosen].sum()), predictions)


def count_pieces(encoded: Encoded) -> Array:
    """The pieces of every item."""
    lengths: Array = encoded.sequences.pieces.lengths.reshape(-1, encoded.choices).sum(1)
    return lengths


def divide_into_batches(encoded: Encoded, batch: int) -> list[Array]:
    """Divides items into batches in their order, each sorted by length."""
    lengths = count_pieces(encoded)
    batches = np.split(np.arange(len(lengths)), np.arange(batch, len(lengths), batch))
    return [chosen[np.argsort(lengths[chosen], kind="stable")] for chosen in batches]


def make_evaluation_batches(items: Items, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Array, TaskBatch]]:
    """This rank's batches of all items, each with the numbers of its items; every rank has as many batches, of which
    the last may come twice. What is done at once needs no thread that prepares the next batches."""
    batches = _make_evaluation_batches(items, rank, ranks)
    return batches if len(items) <= FEW else (batch for batch, _ in in_thread(batches, WINDOW))


def _make_evaluation_batches(items: Items, rank: int, ranks: int) -> Iterator[tuple[Array, TaskBatch]]:
    for begin in range(0, len(items), EVALUATED_TOGETHER):
        numbers = np.arange(begin, min(begin + EVALUATED_TOGETHER, len(items)))
        encoded = items.encode(numbers)
        lengths = count_pieces(encoded)
        by_length = np.argsort(-lengths, kind="stable")
        batches = split_by_pieces(by_length, lengths)
        for first in range(0, len(batches), ranks):
            chosen = batches[min(first + rank, len(batches) - 1)]
            yield numbers[chosen], pack(encoded, chosen, numbers)


def split_by_pieces(order: Array, lengths: Array) -> list[Array]:
    """Divides items in this order into batches of at most `PIECES` pieces, or of one item."""
    batches, begin, pieces = [], 0, 0
    for place, length in enumerate(lengths[order].tolist()):
        if pieces and pieces + length > PIECES:
            batches.append(order[begin:place])
            begin, pieces = place, 0
        pieces += length
    return [*batches, order[begin:]]


def pack(encoded: Encoded, chosen: Array, numbers: Array | None = None, labelled: bool = True) -> TaskBatch:
    """Makes a batch of the chosen items; `numbers` says which of the split every encoded item is."""
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
