"""Examples of a length that the shards lack are cut out of longer ones around the place where B begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import write_wiki
from hypothesis import given
from hypothesis import strategies as st
from support.sharding import run
from support.shards import make_shards

from data_prep.arrow_files import read_shard
from data_prep.shards import Manifest
from pretraining.data.dataset import Dataset, num_held_out
from pretraining.model.rows import Rows
from pretraining.model.shape import Shape
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.planning.amount import measure_sequences, most_predictions

CLS, SEP = 2, 3


class Example(NamedTuple):
    """An example as lists; a label at every place that is predicted."""

    first: list[int]
    second: list[int]
    labels: dict[int, int]

    @property
    def pieces(self) -> list[int]:
        return [CLS, *self.first, SEP, *([*self.second, SEP] if self.second else [])]

    @property
    def boundary(self) -> int:
        return len(self.first) + 2

    def cut(self, limit: int) -> Example:
        """Takes away one piece at a time: the first of A, or the last of B where that is longer."""
        first, second, before = list(self.first), list(self.second), 0
        while len(first) + len(second) + (3 if second else 2) > limit:
            if len(first) >= len(second):
                first.pop(0 if second else -1)
                before += bool(second)
            else:
                second.pop()
        kept = {*range(1, len(first) + 1), *range(len(first) + 2, len(first) + 2 + len(second))}
        moved = {place - before: label for place, label in self.labels.items()}
        return Example(first, second, {place: label for place, label in moved.items() if place in kept})


@st.composite
def examples(draw: st.DrawFn) -> Example:
    first = draw(st.lists(st.integers(10, 99), min_size=1, max_size=60))
    second = draw(st.lists(st.integers(10, 99), max_size=60))
    text = [place for place in range(1, len(first) + len(second) + 2) if place != len(first) + 1]
    places = draw(st.lists(st.sampled_from(text), unique=True, max_size=8))
    return Example(first, second, {place: 1000 + place for place in sorted(places)})


def rows_of(examples: list[Example]) -> Rows:
    """The examples as flat arrays."""
    return Rows(
        where=np.array([[0, number] for number in range(len(examples))]),
        lengths=np.array([len(each.pieces) for each in examples]),
        pieces=np.array([piece for each in examples for piece in each.pieces]),
        boundaries=np.array([each.boundary for each in examples]),
        random_next=np.arange(len(examples)) % 2,
        predictions=np.array([len(each.labels) for each in examples]),
        positions=np.array([place for each in examples for place in each.labels], np.int64),
        labels=np.array([label for each in examples for label in each.labels.values()], np.int64),
    )


@given(st.lists(examples(), min_size=1, max_size=6), st.integers(5, 130))
def test_what_is_cut_is_what_taking_pieces_away_one_by_one_leaves(given: list[Example], limit: int) -> None:
    found, expected = rows_of(given).shorten(limit), rows_of([each.cut(limit) for each in given])
    for name, values in vars(expected).items():
        assert getattr(found, name).tolist() == values.tolist(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of lengths 32 and 64."""
    return make_shards(tmp_path_factory.mktemp("rows") / "shards")


@pytest.fixture(scope="module")
def unpaired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of length 64, of examples without B."""
    place = tmp_path_factory.mktemp("unpaired")
    run(write_wiki(place / "wiki"), place / "shards", "--pairs", "none")
    return place / "shards"


def slow_cut(row: dict[str, Any], limit: int) -> Example:
    """Cuts a row of a shard by the reference above."""
    pieces, boundary = row["pieces"], row["boundary"]
    labels = {each["position"]: each["piece"] for each in row["masked"]}
    return Example(pieces[1 : boundary - 1], pieces[boundary:-1], labels).cut(limit)


@pytest.mark.parametrize(("length", "stored"), [(24, 32), (31, 32), (33, 64), (48, 64)])
@pytest.mark.parametrize("validation", [False, True])
def test_examples_of_another_length_come_from_the_next_longer_ones(
    length: int, stored: int, validation: bool, folder: Path
) -> None:
    dataset = Dataset(folder, Manifest.read(folder), length, validation)
    assert {Path(record.path).parts[0] for record in dataset.records} == {f"length-{stored}"}
    check_against_shards(folder, dataset)


def test_examples_without_b_keep_their_beginning(unpaired: Path) -> None:
    check_against_shards(unpaired, Dataset(unpaired, Manifest.read(unpaired), 24))


def check_against_shards(folder: Path, dataset: Dataset) -> None:
    """Compares a data set with its shards, read slowly and cut by the reference."""
    chosen = dataset.first_examples(dataset.num_examples // len(dataset.shard_rows))
    rows, (lengths, predictions) = dataset.read(chosen), dataset.sizes(chosen)
    assert rows.lengths.tolist() == lengths.tolist()
    assert rows.predictions.tolist() == predictions.tolist()
    assert rows.lengths.max() == dataset.length
    shards = [read_shard(folder / record.path).to_pylist() for record in dataset.records]
    expected = [slow_cut(shards[shard][row], dataset.length) for shard, row in rows.where]
    sep = shards[0][0]["pieces"][-1]
    assert lengths.tolist() == [len(each.pieces) for each in expected]
    assert rows.labels.tolist() == [label for each in expected for label in each.labels.values()]
    assert rows.positions.tolist() == [place for each in expected for place in each.labels]
    ends = np.cumsum(rows.lengths)
    for end, size, boundary, each in zip(ends, rows.lengths, rows.boundaries, expected, strict=True):
        found = rows.pieces[end - size : end].tolist()
        assert found[1 : boundary - 1] + found[boundary:-1] == each.first + each.second
        assert (found[boundary - 1], found[-1]) == (sep, sep)


def test_plans_know_how_long_cut_examples_are(folder: Path) -> None:
    manifest, shape = Manifest.read(folder), Shape.from_size("tiny", 300)
    dataset = Dataset(folder, manifest, 24)
    lengths, predictions = dataset.sizes(dataset.first_examples(sum(dataset.shard_rows[0])))
    found = measure_sequences(shape, 24, manifest)
    assert (found.stored, measure_sequences(shape, 32, manifest).stored) == (32, 32)
    assert found.pieces == pytest.approx(lengths.mean(), rel=0.01)
    assert found.predictions == pytest.approx(predictions.mean(), rel=0.05)
    assert predictions.max() <= most_predictions(MLM, 24, manifest) <= most_predictions(MLM, 32, manifest)
    assert num_held_out(manifest, 24) == num_held_out(manifest, 32) > 0
