"""Batches have every item once an epoch, in an order that neither ranks nor stops change; and rows of different
lengths beside lists of lists."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.common.arrays import Array
from finetuning.inputs import Encoded, Ragged, Sequences
from finetuning.running.batches import TaskBatches, TrainingBatches, make_evaluation_batches, split_by_pieces
from finetuning.settings import FineTuning


@dataclass
class Counted:
    """Items of different lengths whose pieces are their own numbers."""

    count: int

    def __len__(self) -> int:
        return self.count

    def encode(self, numbers: Array) -> Encoded:
        rows = [np.full(2 + number % 7, number, np.int32) for number in numbers.tolist()]
        pieces = Ragged.from_rows(rows)
        return Encoded(Sequences(pieces, pieces.lengths), Ragged.from_table(numbers[:, None]))


def settings(**values: object) -> FineTuning:
    return FineTuning.model_validate(values)


def items_of(step: TaskBatches) -> list[int]:
    """The items that a rank learns from in a step."""
    return [int(label) for batch in step.micro if batch.labels is not None for label in batch.labels]


def drawn(count: int, start: int = 0, rank: int = 0, ranks: int = 1, **values: object) -> list[list[int]]:
    batches = TrainingBatches(Counted(count), settings(**values), rank, ranks)
    return [items_of(step) for step, _ in batches.iterate(start)]


@hypothesis.settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 3), st.data())
def test_every_epoch_has_every_item_once_also_where_a_run_goes_on(
    count: int, batch: int, epochs: int, data: st.DataObject
) -> None:
    steps = drawn(count, batch=batch, epochs=float(epochs))
    each = -(-count // batch)
    for epoch in range(epochs):
        assert sorted(chain(*steps[epoch * each : (epoch + 1) * each])) == list(range(count))
    start = data.draw(st.integers(0, len(steps)))
    assert drawn(count, start, batch=batch, epochs=float(epochs)) == steps[start:]


@hypothesis.settings(max_examples=40)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_ranks_share_the_batch_of_one_rank(count: int, batch: int, ranks: int, micro_batch: int) -> None:
    alone = drawn(count, batch=batch, epochs=1.0)
    together = [drawn(count, 0, rank, ranks, batch=batch, micro_batch=micro_batch, epochs=1.0) for rank in range(ranks)]
    assert [sorted(chain(*step)) for step in zip(*together, strict=True)] == [sorted(step) for step in alone]


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_meet_in_as_many_micro_batches_and_divide_by_the_same(ranks: int) -> None:
    """A rank without items in a batch, which is smaller than the number of ranks, computes all the same."""
    own = settings(batch=6, micro_batch=1, epochs=1.0)
    steps = [[step for step, _ in TrainingBatches(Counted(13), own, rank, ranks).iterate(0)] for rank in range(ranks)]
    for step in zip(*steps, strict=True):
        assert len({len(batches.micro) for batches in step}) == 1
        assert {batches.labels for batches in step} == {sum(len(items_of(batches)) for batches in step)}


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    first, other = (drawn(500, batch=5, epochs=2.0, seed=seed) for seed in (1, 2))
    assert first[:100] != first[100:]
    assert first[:100] != other[:100]


def test_lengths_are_mixed_as_they_come() -> None:
    """Where they tell classes apart, a batch of like lengths would have one class."""
    lengths = [{2 + item % 7 for item in step} for step in drawn(64 * 16, batch=16, epochs=1.0)]
    assert min(map(len, lengths)) >= 4


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 9), (2, 6), (3, 4), (4, 3)])
def test_ranks_and_micro_batches_have_equal_work(ranks: int, micro_batch: int) -> None:
    """Lengths lie between 2 and 8: two hands of cards that are dealt in order differ by one card's range at most."""
    own, items = settings(batch=36, micro_batch=micro_batch, epochs=1.0), Counted(36 * 4)
    steps = [[step for step, _ in TrainingBatches(items, own, rank, ranks).iterate(0)] for rank in range(ranks)]
    for step in zip(*steps, strict=True):
        pieces = [len(batch.pieces) for rank in step for batch in rank.micro]
        assert max(pieces) - min(pieces) <= 8 - 2


@given(st.integers(1, 200), st.integers(1, 4))
def test_evaluation_has_every_item_and_ranks_meet_as_often(count: int, ranks: int) -> None:
    batches = [list(make_evaluation_batches(Counted(count), rank, ranks)) for rank in range(ranks)]
    assert len({len(own) for own in batches}) == 1
    found = {int(number) for own in batches for numbers, _ in own for number in numbers}
    assert found == set(range(count))


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=40))
def test_batches_for_evaluation_are_bounded(lengths: list[int]) -> None:
    batches = split_by_pieces(np.arange(len(lengths)), np.array(lengths))
    assert np.array_equal(np.concatenate(batches), np.arange(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[item] for item in batch) <= 8192 for batch in batches)


# Rows of different lengths


ROWS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6)


@given(ROWS, st.data())
def test_stretches_of_rows_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    begins = [data.draw(st.integers(0, len(rows[number]))) for number in wanted]
    ends = [data.draw(st.integers(begin, len(rows[number]))) for number, begin in zip(wanted, begins, strict=True)]
    ragged = Ragged.from_rows([np.array(row, np.int64) for row in rows])
    numbers, first, last = (np.array(values, np.int64) for values in (wanted, begins, ends))
    stretches, taken = ragged.take_stretches(numbers, first, last), ragged.take(numbers)
    assert [taken.row(at).tolist() for at in range(len(taken))] == [rows[number] for number in wanted]
    assert [stretches.row(at).tolist() for at in range(len(stretches))] == [
        rows[number][begin:end] for number, begin, end in zip(wanted, begins, ends, strict=True)
    ]
