"""What the model gets to see: the right examples, dealt evenly, the same for any number of ranks."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_prep.arrow_files import read_shard
from data_prep.shards import Manifest, ShardSet
from pretraining.data.batches import deal, step_batches, training_batches, validation_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.model.batch import Batch, PretrainingBatch, PretrainingBatches
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.processes.ahead import NAME

pytest_plugins = ["support.shard_fixtures"]

GLOBAL_BATCH = 48
LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 6), (3, 2), (4, 1), (4, 12)]  # ranks, micro-batches


def order_of(dataset: Dataset, batch_size: int = GLOBAL_BATCH) -> BatchOrder:
    return BatchOrder(Order(5, dataset.shard_rows), batch_size)


def keys(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """Shard and row of each example."""
    return [(shard, row) for batch in batches for shard, row in batch.examples.tolist()]


def steps_of(dataset: Dataset, order: BatchOrder, step: int, ranks: int, accumulation: int) -> list[PretrainingBatches]:
    """What each rank does in a step."""
    return [step_batches(dataset, order, step, rank, ranks, accumulation) for rank in range(ranks)]


def hashes(dataset: Dataset, ranks: int, accumulation: int, first: int, steps: int) -> list[str]:
    """A hash for each global batch, over the contents of its examples. Every rank must know its totals."""
    order, found = order_of(dataset), []
    for step in range(first, first + steps):
        parts = steps_of(dataset, order, step, ranks, accumulation)
        batches = [batch for part in parts for batch in part.micro]
        contents = [content(batch, index) for batch in batches for index in range(len(batch.lengths))]
        assert {len(part.micro) for part in parts} == {accumulation}
        assert {part.sequences for part in parts} == {len(contents)} == {GLOBAL_BATCH}
        assert {part.predictions for part in parts} == {sum(len(batch.labels) for batch in batches)}
        found.append(hashlib.sha256("\n".join(sorted(contents)).encode()).hexdigest())
    return found


def content(batch: PretrainingBatch, index: int) -> str:
    """An example of a batch in words."""
    begin, end = batch.starts[index : index + 2].tolist()
    predicted = (batch.chosen >= begin) & (batch.chosen < end)
    parts = [batch.pieces[begin:end], batch.segments[begin:end], batch.chosen[predicted] - begin]
    return repr([each.tolist() for each in [*parts, batch.labels[predicted], batch.random_next[index]]])


def content_of_row(row: dict[str, Any]) -> str:
    """The same from a row of a shard, read slowly."""
    segments = [int(position >= row["boundary"]) for position in range(len(row["pieces"]))]
    positions, labels = ([each[name] for each in row["masked"]] for name in ("position", "piece"))
    return repr([list(row["pieces"]), segments, positions, labels, int(row["random_next"])])


@pytest.mark.parametrize("length", [32, 64])
def test_batches_hold_what_the_rows_of_the_shards_hold(length: int, folder: Path, manifest: Manifest) -> None:
    dataset = Dataset(folder, manifest, length)
    rows = [read_shard(folder / record.path).to_pylist() for record in dataset.records]
    examples = Order(5, dataset.shard_rows).examples(sum(dataset.shard_rows[0]) - 150, 300)
    batch = MLM.batch(dataset.read(examples))
    for index, (number, row) in enumerate(batch.examples.tolist()):
        assert content(batch, index) == content_of_row(rows[number][row])
    assert batch.lengths == tuple(len(rows[number][row]["pieces"]) for number, row in batch.examples.tolist())
    assert batch.positions.tolist() == [position for size in batch.lengths for position in range(size)]
    assert batch.starts.tolist() == np.cumsum([0, *batch.lengths]).tolist()
    assert {str(each.dtype) for each in (batch.pieces, batch.segments, batch.positions, batch.chosen)} == {
        "torch.int64"
    }
    assert (batch.labels.dtype, batch.random_next.dtype, batch.starts.dtype) == (torch.int64, torch.int64, torch.int32)
    assert (batch.chosen.diff() > 0).all()


def test_examples_are_those_that_the_order_names(dataset: Dataset) -> None:
    order = order_of(dataset)
    [step] = steps_of(dataset, order, 3, 1, 1)
    named = order.examples(3)
    first = np.cumsum([0, *(len(rows) for rows in dataset.shard_rows)])
    expected = zip((first[named.duplicate] + named.shard).tolist(), named.row.tolist(), strict=True)
    assert sorted(keys(step.micro)) == sorted(expected)


@pytest.mark.parametrize(("ranks", "accumulation"), LAYOUTS)
def test_global_batches_do_not_depend_on_ranks_or_micro_batches(
    ranks: int, accumulation: int, dataset: Dataset
) -> None:
    """Nor on where a run starts: these steps begin in mid-epoch and go on into the next, with another duplicate."""
    first = sum(dataset.shard_rows[0]) // GLOBAL_BATCH - 2
    assert hashes(dataset, ranks, accumulation, first, 4) == hashes(dataset, 1, 1, first - 2, 6)[2:]


def test_every_example_comes_once_an_epoch(dataset: Dataset) -> None:
    order, found = order_of(dataset), Counter[tuple[int, int]]()
    total = dataset.num_examples  # both duplicates
    for step in range(-(-total // GLOBAL_BATCH)):
        for part in steps_of(dataset, order, step, 2, 2):
            found.update(keys(part.micro))
    sizes = [record.rows for record in dataset.records]
    assert set(found) == {(number, row) for number, size in enumerate(sizes) for row in range(size)}
    assert found.total() - total == sum(each - 1 for each in found.values()) < GLOBAL_BATCH


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.integers(1, 8),
    accumulation=st.integers(1, 5),
    micro=st.integers(1, 40),
    full=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_dealing_gives_every_sequence_once_and_loads_that_differ_little(
    ranks: int, accumulation: int, micro: int, full: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    count = ranks * accumulation * micro
    lengths = np.where(draw.random(count) < full, 512, draw.integers(5, 513, count))
    dealt = deal(lengths, ranks, accumulation)
    assert dealt.shape == (ranks, accumulation, micro)
    assert sorted(dealt.ravel()) == list(range(count))
    sums = lengths[dealt].sum(2)
    assert sums.max() - sums.min() <= lengths.max() - lengths.min()  # never more than one sequence's difference
    assert (np.diff(sums.max(0)) <= 0).all()  # the heaviest come first
    assert (np.diff(lengths[dealt], axis=2) <= 0).all()
    assert np.array_equal(dealt, deal(lengths, ranks, accumulation))


@pytest.mark.parametrize("length", [128, 512])
def test_ranks_get_nearly_the_same_pieces(length: int) -> None:
    """With lengths like those of real text: half of them full at 128, one in seven at 512."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.minimum(length, draw.gamma(1.6, 90, 8 * 4 * 32).astype(np.int64) + 5)
        sums = lengths[deal(lengths, 8, 4)].sum(2)
        assert (sums.max(0) / sums.min(0)).max() < 1.005
        assert sums.max() / sums.min() < 1.02


def test_batches_of_training_come_in_the_order_of_their_steps(
    dataset: Dataset, folder: Path, manifest: Manifest
) -> None:
    order = order_of(dataset)
    found = [keys(step.micro) for step, _ in training_batches(dataset, order, range(4, 9), 1, 2, 3)]
    other = Dataset(folder, manifest, 32)
    assert found == [keys(step_batches(other, order, step, 1, 2, 3).micro) for step in range(4, 9)]


def test_batches_for_a_gpu_are_pinned_by_the_thread_that_reads_them(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[int, str]] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append((tensor.data_ptr(), threading.current_thread().name))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    with closing(training_batches(dataset, order_of(dataset), range(2), device=torch.device("cuda"))) as batches:
        tensors = [value for value in vars(next(batches)[0].micro[0]).values() if isinstance(value, Tensor)]
    assert len(tensors) == 7
    assert {each.data_ptr() for each in tensors} <= {place for place, _ in pinned}
    assert all(name.startswith(NAME) for _, name in pinned)
    with closing(training_batches(dataset, order_of(dataset), range(2))) as batches:
        count = len(pinned)
        next(batches)
        assert len(pinned) == count, "for a CPU nothing is copied"


def test_what_does_not_divide_is_a_mistake_of_ours(dataset: Dataset) -> None:
    with pytest.raises(AssertionError):
        step_batches(dataset, order_of(dataset, batch_size=10), 0, ranks=4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("sequences", "limit"), [(16, None), (7, 50), (64, 10), (1, 3), (8, 10**6)])
def test_held_out_examples_count_once_over_all_ranks(
    ranks: int, sequences: int, limit: int | None, folder: Path, manifest: Manifest
) -> None:
    parts = []
    for rank in range(ranks):
        dataset = Dataset(folder, manifest, 64, validation=True, rank=rank, ranks=ranks)
        parts.append(list(validation_batches(dataset, rank, ranks, sequences, limit)))
    counted = keys(batch for part in parts for batch, counts in part if counts)
    expected = [(number, row) for number, record in enumerate(dataset.records) for row in range(record.rows)]
    assert sorted(counted) == expected[:limit]
    assert len({len(part) for part in parts}) == 1  # ZeRO-3 gathers in step
    assert all(len(batch.lengths) <= sequences for part in parts for batch, _ in part)
    lengths = [size for turn in zip(*parts, strict=True) for batch, counts in turn if counts for size in batch.lengths]
    assert lengths == sorted(lengths, reverse=True)


def test_held_out_examples_are_no_training_examples(folder: Path, manifest: Manifest) -> None:
    validation = {record.path for record in Dataset(folder, manifest, 64, validation=True).records}
    assert validation == {record.path for record in manifest.sets()[ShardSet(64, 0, validation=True)]}
    assert not validation & {record.path for record in Dataset(folder, manifest, 64).records}
