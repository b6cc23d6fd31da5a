"""What the model gets to see: the right examples and masks, dealt evenly, the same for any number of ranks."""

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shards import make_many_shards
from torch import Tensor

from data_prep.arrow_files import read_shard
from data_prep.shards import Manifest, ShardSet
from data_prep.vocabulary.source import read_vocabulary
from pretraining.architectures.declaration import make_shape
from pretraining.config.settings import Objective
from pretraining.data.batches import deal_sequences, step_batches, training_batches, validation_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.model.batch import Batch, PretrainingBatch, PretrainingBatches
from pretraining.objectives.declaration import configure_objective
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.planning.amount import measure_sequences, most_predictions
from pretraining.processes.ahead import NAME

GLOBAL_BATCH = 48
LAYOUTS = [(1, 4), (2, 1), (3, 2), (4, 12)]  # ranks, micro-batches
TOTAL = 100
"""Steps of the run whose batches are read."""


def open_with(folder: Path, length: int = 32, **settings: object) -> Dataset:
    objective = configure_objective(Objective.model_validate({"masks": "dynamic", **settings}))
    return Dataset(Corpora.one(folder), length, objective=objective)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_many_shards(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return Manifest.read(folder)


@pytest.fixture
def dataset(folder: Path, manifest: Manifest) -> Dataset:
    return Dataset(Corpora.one(folder, manifest), 32)


def order_of(dataset: Dataset, batch_size: int = GLOBAL_BATCH) -> BatchOrder:
    return BatchOrder(Order(5, dataset.shard_rows), batch_size, total=TOTAL)


def keys(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """Shard and row of each example."""
    return [(shard, row) for batch in batches for shard, row in batch.examples.tolist()]


def steps_of(dataset: Dataset, order: BatchOrder, step: int, ranks: int, accumulation: int) -> list[PretrainingBatches]:
    """What each rank does in a step."""
    return [step_batches(dataset, order, step, rank, ranks, ranks * accumulation) for rank in range(ranks)]


class Seen(NamedTuple):
    """What a model sees of an example, and which one it is."""

    example: tuple[int, ...]
    pieces: list[int]
    segments: list[int]
    places: list[int]
    labels: list[int]
    random_next: int


def contents(batch: PretrainingBatch) -> list[Seen]:
    found = []
    for index, (begin, end) in enumerate(pairwise(batch.starts.tolist())):
        predicted = (batch.chosen >= begin) & (batch.chosen < end)
        columns = batch.pieces[begin:end], batch.segments[begin:end], batch.chosen[predicted] - begin
        pieces, segments, places = (each.tolist() for each in columns)
        labels, follows = batch.labels[predicted].tolist(), int(batch.random_next[index])
        found.append(Seen(tuple(batch.examples[index].tolist()), pieces, segments, places, labels, follows))
    return found


def see_step(dataset: Dataset, step: int, ranks: int = 1, accumulation: int = 1) -> list[Seen]:
    """What the model sees of the examples of a step, whoever reads them. Every rank must know the totals."""
    parts = steps_of(dataset, order_of(dataset), step, ranks, accumulation)
    batches = [batch for part in parts for batch in part.micro]
    seen = sorted(each for batch in batches for each in contents(batch))
    assert {len(part.micro) for part in parts} == {accumulation}
    assert {part.sequences for part in parts} == {len(seen)} == {GLOBAL_BATCH}
    assert {part.predictions for part in parts} == {sum(len(batch.labels) for batch in batches)}
    return seen


def describe_row(row: dict[str, Any]) -> str:
    """An example of a shard, read slowly."""
    segments = [int(position >= row["boundary"]) for position in range(len(row["pieces"]))]
    places, labels = ([each[name] for each in row["masked"]] for name in ("position", "piece"))
    return repr(Seen((), [*row["pieces"]], segments, places, labels, int(row["random_next"])))


@pytest.mark.parametrize("length", [32, 64])
def test_batches_hold_what_the_rows_of_the_shards_hold(length: int, folder: Path, manifest: Manifest) -> None:
    dataset = Dataset(Corpora.one(folder, manifest), length)
    rows = [read_shard(folder / record.path).to_pylist() for record in dataset.records]
    examples = Order(5, dataset.shard_rows).examples(sum(dataset.shard_rows[0]) - 150, 300)
    batch = MLM.batch(dataset.read(examples))
    for each in contents(batch):
        number, row = each.example
        assert repr(each._replace(example=())) == describe_row(rows[number][row])
    assert batch.lengths == tuple(len(rows[number][row]["pieces"]) for number, row in batch.examples.tolist())
    assert batch.positions.tolist() == [position for size in batch.lengths for position in range(size)]
    assert batch.starts.tolist() == np.cumsum([0, *batch.lengths]).tolist()
    longs = batch.pieces, batch.segments, batch.positions, batch.chosen, batch.labels, batch.random_next
    assert ({each.dtype for each in longs}, batch.starts.dtype) == ({torch.int64}, torch.int32)
    assert (batch.chosen.diff() > 0).all()


@pytest.mark.parametrize("masks", ["static", "dynamic"])
@pytest.mark.parametrize("length", [32, 48])
def test_global_batches_depend_on_no_ranks_or_micro_batches(length: int, masks: str, folder: Path) -> None:
    """Nor do masks that are drawn, after a cut: 48 is cut out of 64. The steps are the last of an epoch, the first of
    the next, with another duplicate, and the last of the run. The order names the examples, and a rate that moves
    gives exact counts."""
    dataset = open_with(folder, length, masks=masks, **({"rate": 0.3, "last_rate": 0.15} if masks == "dynamic" else {}))
    order, first = order_of(dataset), np.cumsum([0, *(len(rows) for rows in dataset.shard_rows)])
    last = sum(dataset.shard_rows[0]) // GLOBAL_BATCH
    for step in (last - 1, last, last + 1, TOTAL - 1):
        seen, named = see_step(dataset, step), order.examples(step)
        for ranks, accumulation in LAYOUTS:
            assert see_step(dataset, step, ranks, accumulation) == seen
        shards = (first[named.duplicate] + named.shard).tolist()
        assert [each.example for each in seen] == sorted(zip(shards, named.row.tolist(), strict=True))
        assert max(len(each.pieces) for each in seen) == length
        if masks == "dynamic":
            rate = 0.3 - 0.15 * step / (TOTAL - 1)
            assert all(len(each.places) == max(1, round(rate * len(each.pieces))) for each in seen)


def test_every_example_comes_once_an_epoch(dataset: Dataset) -> None:
    order, found = order_of(dataset, 480), Counter[tuple[int, int]]()
    total = sum(map(sum, dataset.shard_rows))  # both duplicates
    for step in range(-(-total // 480)):
        for part in steps_of(dataset, order, step, 2, 2):
            found.update(keys(part.micro))
    sizes = [record.rows for record in dataset.records]
    assert set(found) == {(number, row) for number, size in enumerate(sizes) for row in range(size)}
    assert found.total() - total == sum(each - 1 for each in found.values()) < 480


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 40), st.floats(0, 1), st.integers(0, 1000))
def test_dealing_is_whole_and_even(ranks: int, accumulation: int, micro: int, full: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = ranks * accumulation * micro
    lengths = np.where(draw.random(count) < full, 512, draw.integers(5, 513, count))
    bins = deal_sequences(lengths, ranks * accumulation)
    dealt = bins.reshape(accumulation, ranks, micro).swapaxes(0, 1)
    assert (dealt.shape, sorted(dealt.ravel())) == ((ranks, accumulation, micro), list(range(count)))
    sums = lengths[dealt].sum(2)
    assert sums.max() - sums.min() <= lengths.max() - lengths.min()  # never more than one sequence's difference
    assert (np.diff(sums.max(0)) <= 0).all()  # the heaviest come first
    assert (np.diff(lengths[dealt], axis=2) <= 0).all()
    assert np.array_equal(bins, deal_sequences(lengths, ranks * accumulation))


@pytest.mark.parametrize("length", [128, 512])
def test_ranks_get_nearly_the_same_pieces(length: int) -> None:
    """With lengths like those of real text: half of them full at 128, one in seven at 512."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.minimum(length, draw.gamma(1.6, 90, 8 * 4 * 32).astype(np.int64) + 5)
        sums = lengths[deal_sequences(lengths, 32)].sum(1).reshape(4, 8).T
        assert (sums.max(0) / sums.min(0)).max() < 1.005
        assert sums.max() / sums.min() < 1.02


def test_batches_of_training_come_in_order(dataset: Dataset, folder: Path, manifest: Manifest) -> None:
    order = order_of(dataset)
    of_a_rank = Dataset(Corpora.one(folder, manifest), 32, rank=1, ranks=2)
    found = [keys(step.micro) for step, _ in training_batches(of_a_rank, order, range(4, 9), 6)]
    assert found == [keys(step_batches(dataset, order, step, 1, 2, 6).micro) for step in range(4, 9)]


def test_batches_for_a_gpu_are_pinned_by_their_reader(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize(("sequences", "limit"), [(16, None), (7, 50), (64, 10), (1, 3), (8, 10**6)])
def test_held_out_ones_count_once(
    ranks: int, sequences: int, limit: int | None, folder: Path, manifest: Manifest
) -> None:
    parts = []
    for rank in range(ranks):
        dataset = Dataset(Corpora.one(folder, manifest), 64, validation=True, rank=rank, ranks=ranks)
        parts.append(list(validation_batches(dataset, rank, ranks, sequences, limit)))
    counted = keys(batch for part in parts for batch, counts in part if counts)
    expected = [(number, row) for number, record in enumerate(dataset.records) for row in range(record.rows)]
    assert sorted(counted) == expected[:limit]
    assert len({len(part) for part in parts}) == 1  # ZeRO-3 gathers in step
    assert all(len(batch.lengths) <= sequences for part in parts for batch, _ in part)
    lengths = [size for turn in zip(*parts, strict=True) for batch, counts in turn if counts for size in batch.lengths]
    assert lengths == sorted(lengths, reverse=True)
    held_out = {record.path for record in dataset.records}
    assert held_out == {record.path for record in manifest.sets()[ShardSet(64, 0, validation=True)]}
    assert not held_out & {record.path for record in Dataset(Corpora.one(folder, manifest), 64).records}


def test_every_epoch_draws_anew_from_the_same_text(folder: Path) -> None:
    dataset = open_with(folder)
    rows = (dataset.shard_rows[0][:1],)
    order = BatchOrder(Order(5, rows), sum(rows[0]))  # a step is an epoch of one shard
    first, second = (sorted(contents(step_batches(dataset, order, epoch).micro[0])) for epoch in (0, 1))
    assert not set(order.keys(0).tolist()) & set(order.keys(1).tolist())
    assert [(each.example, original(each)) for each in first] == [(each.example, original(each)) for each in second]
    assert sum(one.places == other.places for one, other in zip(first, second, strict=True)) < 0.02 * len(first)


def original(example: Seen) -> list[int]:
    text = [*example.pieces]
    for place, label in zip(example.places, example.labels, strict=True):
        text[place] = label
    return text


def test_they_are_as_many_as_the_static_masks_of_the_same_text(folder: Path) -> None:
    counts, texts = [], []
    for masks in ("static", "dynamic"):
        dataset = open_with(folder, masks=masks)
        for step in range(4):
            batches = step_batches(dataset, order_of(dataset, 512), step)
            [batch] = batches.micro
            assert batches.predictions == len(batch.labels)
            counts.append(len(batch.labels))
            texts.append(batch.pieces.clone().scatter(0, batch.chosen, batch.labels).tolist())
    assert counts[:4] == counts[4:]
    assert texts[:4] == texts[4:]


def test_what_is_left_out_moves_no_masks(folder: Path) -> None:
    dataset = open_with(folder)
    whole, gap = (BatchOrder(Order(5, dataset.shard_rows), 8, left) for left in ((), (2,)))
    for step in range(2, 5):
        one, other = (step_batches(dataset, order, at) for order, at in ((whole, step + 1), (gap, step)))
        assert contents(one.micro[0]) == contents(other.micro[0])


def test_validation_has_the_masks_of_the_data(folder: Path) -> None:
    """Also under another rate, so that losses compare."""
    manifest, found = Manifest.read(folder), []
    for chosen in ({}, {"masks": "dynamic", "rate": 0.4, "split": [1.0, 0.0, 0.0]}):
        objective = configure_objective(Objective.model_validate(chosen))
        dataset = Dataset(Corpora.one(folder, manifest), 32, validation=True, objective=objective)
        found.append([each for batch, _ in validation_batches(dataset, 0, 1, 16) for each in contents(batch)])
    assert found[0] == found[1]


@pytest.mark.parametrize("split", [[0.8, 0.1, 0.1], [0.8, 0.2, 0], [0, 0.8, 0.2], [0, 1, 0], [0, 0, 1]])
def test_the_rows_of_table_8_come_of_one_folder(folder: Path, split: tuple[float, ...]) -> None:
    """Masked, replaced at random, the same: Devlin et al. 2019, C.2."""
    mask = read_vocabulary(folder).special.mask
    dataset = open_with(folder, split=[float(share) for share in split])
    [batch] = step_batches(dataset, order_of(dataset, 1024), 0).micro
    now = batch.pieces[batch.chosen]
    found = ((now == mask).float().mean().item(), (now == batch.labels).float().mean().item())
    for share, expected in zip(found, (split[0], split[2]), strict=True):
        by_chance = 0.02 * split[1]  # a random piece is [MASK] or the same one now and then
        assert abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / len(now)) + by_chance


def test_plans_count_what_is_predicted(folder: Path) -> None:
    manifest, shape = Manifest.read(folder), make_shape("tiny", 300)
    objective = configure_objective(Objective.model_validate({"masks": "dynamic", "rate": 0.4, "last_rate": 0.2}))
    assert most_predictions(objective, 32, manifest) == round(0.4 * 32)
    assert most_predictions(objective, 48, manifest) == round(0.4 * 48)
    dataset = open_with(folder, rate=0.4, last_rate=0.2)
    every = Order(0, dataset.shard_rows).examples(0, sum(map(sum, dataset.shard_rows)))
    lengths, predictions = dataset.sizes(every, 0.5)
    planned = measure_sequences(shape, 32, manifest, objective)
    assert planned.predictions == pytest.approx(predictions.mean())
    assert planned.pieces == pytest.approx(lengths.mean())
    usual = measure_sequences(shape, 32, manifest)
    assert planned.flops > usual.flops
