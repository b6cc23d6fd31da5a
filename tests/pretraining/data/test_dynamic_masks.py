"""Batches with masks that are drawn anew: of any ranks the same, with totals that every rank knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.shards import Manifest
from data_prep.vocabulary.source import read_vocabulary
from pretraining.config.settings import Objective
from pretraining.data.batches import step_batches, validation_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.model.batch import PretrainingBatch
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import configure_objective
from pretraining.planning.amount import measure_sequences, most_predictions

pytest_plugins = ["support.shard_fixtures"]

TOTAL = 100
"""Steps of the run whose batches are read."""


def open_with(folder: Path, length: int = 32, **settings: object) -> Dataset:
    objective = configure_objective(Objective.model_validate({"masks": "dynamic", **settings}))
    return Dataset(folder, Manifest.read(folder), length, objective=objective)


def order_of(dataset: Dataset, batch: int = 48, seed: int = 5) -> BatchOrder:
    return BatchOrder(Order(seed, dataset.shard_rows), batch, total=TOTAL)


def contents(batch: PretrainingBatch) -> list[tuple[tuple[int, ...], ...]]:
    """Each example: which it is, what the model sees, where it predicts and what."""
    starts = batch.starts.numpy()[:-1]
    bounds = np.searchsorted(batch.chosen.numpy(), starts[1:])
    places = batch.chosen.numpy() - np.repeat(starts, np.diff([0, *bounds, len(batch.chosen)]))
    columns = [np.split(batch.pieces.numpy(), starts[1:])]
    columns += [np.split(values, bounds) for values in (places, batch.labels.numpy())]
    return [
        (tuple(example), *(tuple(part.tolist()) for part in parts))
        for example, *parts in zip(batch.examples.tolist(), *columns, strict=True)
    ]


@pytest.mark.parametrize("length", [32, 48])
def test_any_ranks_and_accumulation_have_the_same_masks_and_totals(folder: Path, length: int) -> None:
    """48 is cut out of 64: masks are drawn after the cut."""
    dataset = open_with(folder, length, rate=0.3, last_rate=0.15)
    order = order_of(dataset)
    for step in (0, 57, TOTAL - 1):
        found = []
        for ranks, accumulation in ((1, 1), (2, 3), (4, 2)):
            parts = [step_batches(dataset, order, step, rank, ranks, accumulation) for rank in range(ranks)]
            micro = [batch for part in parts for batch in part.micro]
            found.append(sorted(each for batch in micro for each in contents(batch)))
            assert {part.predictions for part in parts} == {sum(len(batch.labels) for batch in micro)}
        assert found[0] == found[1] == found[2]
        assert max(len(seen) for _, seen, _, _ in found[0]) == length


def test_a_rate_that_moves_gives_exactly_the_counts_expected(folder: Path) -> None:
    dataset = open_with(folder, rate=0.3, last_rate=0.15)
    order = order_of(dataset)
    for step, rate in ((0, 0.3), (33, 0.25), (99, 0.15)):
        batches = step_batches(dataset, order, step)
        for _, seen, chosen, _ in contents(batches.micro[0]):
            assert len(chosen) == max(1, round(rate * len(seen)))


def test_every_epoch_draws_anew_from_the_same_text(folder: Path) -> None:
    dataset = open_with(folder)
    rows = dataset.shard_rows[:1]
    order = BatchOrder(Order(5, rows), sum(rows[0]))  # a step is an epoch
    first, second = (sorted(contents(step_batches(dataset, order, epoch).micro[0])) for epoch in (0, 1))
    assert not set(order.keys(0).tolist()) & set(order.keys(1).tolist())
    assert [each[0] for each in first] == [each[0] for each in second]
    assert [original(each[1:]) for each in first] == [original(each[1:]) for each in second]
    assert sum(one[2] == other[2] for one, other in zip(first, second, strict=True)) < 0.02 * len(first)


def original(example: tuple[tuple[int, ...], ...]) -> list[int]:
    text = list(example[0])
    for place, label in zip(*example[1:], strict=True):
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
        one, other = (
            contents(step_batches(dataset, order, at).micro[0]) for order, at in ((whole, step + 1), (gap, step))
        )
        assert one == other


def test_validation_has_the_masks_of_the_data(folder: Path) -> None:
    """Also under another rate, so that losses compare."""
    manifest, found = Manifest.read(folder), []
    for settings in ({}, {"masks": "dynamic", "rate": 0.4, "split": [1.0, 0.0, 0.0]}):
        objective = configure_objective(Objective.model_validate(settings))
        dataset = Dataset(folder, manifest, 32, validation=True, objective=objective)
        found.append([each for batch, _ in validation_batches(dataset, 0, 1, 16) for each in contents(batch)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "split", [[0.8, 0.1, 0.1], [1, 0, 0], [0.8, 0.2, 0], [0.8, 0, 0.2], [0, 0.8, 0.2], [0, 1, 0], [0, 0, 1]]
)
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
    manifest, shape = Manifest.read(folder), Shape.from_size("tiny", 300)
    objective = configure_objective(Objective.model_validate({"masks": "dynamic", "rate": 0.4, "last_rate": 0.2}))
    assert most_predictions(objective, 32, manifest) == round(0.4 * 32)
    assert most_predictions(objective, 48, manifest) == round(0.4 * 48)
    dataset = open_with(folder, rate=0.4, last_rate=0.2)
    every = Order(0, dataset.shard_rows).examples(0, dataset.num_examples)
    lengths, predictions = dataset.sizes(every, 0.5)
    planned = measure_sequences(shape, 32, manifest, objective)
    assert planned.predictions == pytest.approx(predictions.mean())
    assert planned.pieces == pytest.approx(lengths.mean())
    usual = measure_sequences(shape, 32, manifest)
    assert planned.flops > usual.flops
