"""Batches without padding: reads the examples of a step, and deals them to ranks and micro-batches.

A global batch is the same for any number of ranks and any micro-batch. Every rank knows the sizes of all its examples
from the offsets of the shards, so that the totals that losses are divided by are exact without communication.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import numpy as np
import torch

from data_prep.common.arrays import Array
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder
from pretraining.model.batch import CPU, Deal, PretrainingBatch, PretrainingBatches
from pretraining.model.rows import Rows
from pretraining.model.shape import OBJECTIVE
from pretraining.objectives.declaration import Objective, objectives
from pretraining.processes.ahead import prepare_in_thread

AHEAD = 3
"""The number of steps whose batches are prepared while another is computed."""


def full_sequences(count: int, length: int, predictions: int, objective: Objective | None = None) -> PretrainingBatch:
    """Makes a batch of `count` sequences without text, all with this length and number of predictions."""
    lengths, zeros = np.full(count, length), np.zeros(count * length, np.int64)
    masks = np.full(count, predictions), np.tile(np.arange(predictions) + 1, count), zeros[: count * predictions]
    return (objective or objectives()[OBJECTIVE]).batch(Rows.from_memory(lengths, zeros, lengths // 2, *masks))


def deal_sequences(lengths: Array, bins: int) -> Array:
    """Deals sequences into micro-batches of the same number and nearly the same pieces.

    Returns indices, (micro-batches, sequences).

    Longest first, in rounds in which each micro-batch gets one: the longest goes to the one with the fewest pieces.
    The heaviest come first, so that what does not fit into memory shows at once, and ranks, which take them in turn,
    hardly wait for one another. Within one, longest first.
    """
    assert len(lengths) % bins == 0, f"{len(lengths)} sequences for {bins} micro-batches"
    dealt = np.argsort(-lengths, kind="stable").reshape(-1, bins)
    sizes = lengths[dealt]
    sums = np.zeros(bins, np.int64)
    for turn in np.flatnonzero(sizes[:, 0] != sizes[:, -1]):  # in other rounds, as with full lengths, all are equal
        fewest = np.argsort(sums, kind="stable")
        dealt[turn, fewest] = dealt[turn].copy()
        sums[fewest] += sizes[turn]
    micro_batches: Array = dealt.T[np.argsort(-sums, kind="stable")]
    return micro_batches


def step_batches(
    dataset: Dataset, order: BatchOrder, step: int, rank: int = 0, ranks: int = 1, count: int = 1
) -> PretrainingBatches:
    """Reads one rank's part of the global batch of a step, of which all ranks compute `count` micro-batches."""
    examples, keys, done = order.examples(step), order.keys(step), order.share_done(step)
    one_way = dataset.objective.draw_one_way(keys)
    lengths, predictions = dataset.sizes(examples, done, one_way)
    mine = deal_sequences(lengths, count)[rank::ranks]
    micro = tuple(dataset.training_batch(examples.take(chosen), keys[chosen], done) for chosen in mine)
    of_one_way = (0, 0) if one_way is None else (int(predictions[one_way].sum()), int(one_way.sum()))
    counts = int(predictions.sum()), int(lengths.sum()), *of_one_way
    return PretrainingBatches(micro, order.batch_size, *counts, deal=Deal(rank, ranks, count))


def training_batches(
    dataset: Dataset, order: BatchOrder, steps: Iterable[int], count: int = 1, device: torch.device = CPU
) -> Generator[tuple[PretrainingBatches, float], None, None]:
    """Prepares the parts of the dataset's rank of the batches of steps, each of `count` micro-batches of all ranks, in
    a thread, ahead of training; close it to end the thread.

    For a GPU they are in pinned memory. Each comes with the seconds that training waited for it.
    """
    read = (step_batches(dataset, order, step, dataset.rank, dataset.ranks, count).pin_for(device) for step in steps)
    return prepare_in_thread(read, AHEAD)


def count_examples(dataset: Dataset, limit: int | None = None, number: int = 0) -> int:
    """Counts the examples of the first duplicate of a corpus, or the first `limit` of them."""
    count = sum(dataset.shard_rows[dataset.first_sets[number]])
    return count if limit is None else min(limit, count)


def validation_batches(
    dataset: Dataset, rank: int, ranks: int, sequences: int, limit: int | None = None, number: int = 0
) -> Iterator[tuple[PretrainingBatch, bool]]:
    """Yields one rank's share of the held-out examples of a corpus (or of the first `limit`), and whether each batch
    counts.

    Every example counts on exactly one rank. All ranks get the same number of batches, because with ZeRO-3 they
    gather weights together: a rank that runs out gets a batch that does not count. The longest come first, so that the
    ranks' batches take about the same time.
    """
    examples = dataset.first_examples(count_examples(dataset, limit, number), number)
    lengths, _ = dataset.sizes(examples)
    order = np.argsort(-lengths, kind="stable")
    batches = [order[at : at + sequences] for at in range(0, len(order), sequences)]
    for number in range(rank, rank + len(batches), ranks):
        chosen = batches[min(number, len(batches) - 1)]
        yield dataset.batch(examples.take(chosen)), number < len(batches)
