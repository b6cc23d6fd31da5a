"""Rows of examples: cut out of longer ones around the place where B begins, and masked anew, exactly and fairly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import write_wiki
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shards import make_shards, run

from data_prep.arrow_files import read_shard
from data_prep.common.arrays import ranges
from data_prep.common.hashing import hash_key
from data_prep.shards import Manifest
from pretraining.architectures.declaration import make_shape
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset, num_held_out
from pretraining.model.masks import Masked, Split, choose_places, count_masked, draw_masks, number_places
from pretraining.model.rows import Draw, Rows
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


@pytest.mark.parametrize(
    ("length", "stored", "validation"), [(24, 32, False), (31, 32, True), (33, 64, True), (48, 64, False)]
)
def test_other_lengths_are_cut_from_the_next_longer(length: int, stored: int, validation: bool, folder: Path) -> None:
    dataset = Dataset(Corpora.one(folder), length, validation)
    assert {Path(record.path).parts[0] for record in dataset.records} == {f"length-{stored}"}
    check_against_shards(folder, dataset)


def test_examples_without_b_keep_their_beginning(unpaired: Path) -> None:
    check_against_shards(unpaired, Dataset(Corpora.one(unpaired), 24))


def check_against_shards(folder: Path, dataset: Dataset) -> None:
    """Compares a data set with its shards, read slowly and cut by the reference."""
    chosen = dataset.first_examples(sum(map(sum, dataset.shard_rows)) // len(dataset.shard_rows))
    rows, (lengths, predictions) = dataset.read(chosen), dataset.sizes(chosen)
    assert (rows.lengths.tolist(), rows.predictions.tolist()) == (lengths.tolist(), predictions.tolist())
    assert rows.lengths.max() == dataset.length
    shards = [read_shard(folder / record.path).to_pylist() for record in dataset.records]
    expected = [slow_cut(shards[shard][row], dataset.length) for shard, row in rows.where]
    sep = shards[0][0]["pieces"][-1]
    assert lengths.tolist() == [len(each.pieces) for each in expected]
    assert rows.labels.tolist() == [label for each in expected for label in each.labels.values()]
    assert rows.positions.tolist() == [place for each in expected for place in each.labels]
    for found, boundary, each in zip(np.split(rows.pieces, rows.starts[1:]), rows.boundaries, expected, strict=True):
        assert [*found[1 : boundary - 1], *found[boundary:-1]] == each.first + each.second
        assert found[boundary - 1] == found[-1] == sep


def test_plans_know_how_long_cut_examples_are(folder: Path) -> None:
    manifest, shape = Manifest.read(folder), make_shape("tiny", 300)
    dataset = Dataset(Corpora.one(folder, manifest), 24)
    lengths, predictions = dataset.sizes(dataset.first_examples(sum(dataset.shard_rows[0])))
    found = measure_sequences(shape, 24, manifest)
    assert (found.stored, measure_sequences(shape, 32, manifest).stored) == (32, 32)
    assert found.pieces == pytest.approx(lengths.mean(), rel=0.01)
    assert found.predictions == pytest.approx(predictions.mean(), rel=0.05)
    assert predictions.max() <= most_predictions(MLM, 24, manifest) <= most_predictions(MLM, 32, manifest)
    assert num_held_out(manifest, 24) == num_held_out(manifest, 32) > 0


VOCABULARY, MASK = 1000, 4
USUAL = Split(0.8, 0.1, 0.1)


def hidden_rows(lengths: list[int], boundaries: list[int]) -> Rows:
    """Examples whose pieces tell where they stand; the shards hide two pieces of each."""
    sizes, begins = np.array(lengths), np.array(boundaries)
    places = ranges(np.zeros_like(sizes), sizes)
    starts = np.cumsum(sizes) - sizes
    pieces = 10 + (places + 7 * np.repeat(np.arange(len(sizes)), sizes)) % (VOCABULARY - 10)
    pieces[starts], pieces[starts + begins - 1], pieces[starts + sizes - 1] = CLS, SEP, SEP
    hidden = np.tile([1, 2], len(sizes))
    labels = pieces[np.repeat(starts, 2) + hidden]
    pieces[np.repeat(starts, 2) + hidden] = MASK
    two, numbers = np.full(len(sizes), 2), np.arange(len(sizes))
    where = np.stack([np.zeros_like(numbers), numbers], axis=1)
    return Rows(where, sizes, pieces, begins, np.zeros_like(sizes), two, hidden, labels)


def draw_for(count: int, seed: int = 0) -> Draw:
    return Draw(hash_key(seed, np.arange(count)), 0.0, VOCABULARY, MASK, SEP)


def by_example(rows: Rows, masked: Masked) -> list[tuple[list[int], list[int], list[int]]]:
    """What the model sees of each example, where it predicts, and what."""
    starts, cuts = rows.starts, np.searchsorted(masked.chosen, rows.starts[1:])
    parts = [np.split(masked.pieces, starts[1:]), np.split(masked.chosen, cuts), np.split(masked.labels, cuts)]
    return [
        (pieces.tolist(), (chosen - start).tolist(), labels.tolist())
        for start, pieces, chosen, labels in zip(starts, *parts, strict=True)
    ]


@st.composite
def row_sets(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(8, 60), min_size=1, max_size=12))
    boundaries = [draw(st.one_of(st.just(length), st.integers(5, length - 2))) for length in lengths]
    return hidden_rows(lengths, boundaries)


@settings(max_examples=60, deadline=None)
@given(rows=row_sets(), rate=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1))
def test_exactly_so_many_are_chosen_and_never_a_mark(rows: Rows, rate: float, seed: int) -> None:
    masked = draw_masks(rows, rate, USUAL, draw_for(len(rows.lengths), seed))
    text = rows.restore_text()
    assert (np.diff(masked.chosen) > 0).all()
    assert not set(text[masked.chosen].tolist()) & {CLS, SEP}
    assert np.array_equal(masked.labels, text[masked.chosen])
    untouched = np.setdiff1d(np.arange(len(text)), masked.chosen)
    assert np.array_equal(masked.pieces[untouched], text[untouched])
    expected = [max(1, min(round(rate * length), length - 3)) for length in rows.lengths.tolist()]
    assert [len(chosen) for _, chosen, _ in by_example(rows, masked)] == expected


@settings(max_examples=40, deadline=None)
@given(rows=row_sets(), rate=st.floats(0.05, 0.9), data=st.data())
def test_an_example_has_the_same_masks_whoever_reads_it(rows: Rows, rate: float, data: st.DataObject) -> None:
    """Alone, or beside any others in any order: it depends on its key and on the rate alone."""
    draw, count = draw_for(len(rows.lengths)), len(rows.lengths)
    together = by_example(rows, draw_masks(rows, rate, USUAL, draw))
    order = data.draw(st.permutations(range(count)))
    again = hidden_rows(rows.lengths[order].tolist(), rows.boundaries[order].tolist())
    again = replace(again, pieces=np.concatenate([np.split(rows.pieces, rows.starts[1:])[number] for number in order]))
    again = replace(again, labels=rows.labels.reshape(-1, 2)[order].ravel())
    found = by_example(again, draw_masks(again, rate, USUAL, replace(draw, keys=draw.keys[order])))
    assert found == [together[number] for number in order]


def test_a_long_example_changes_no_masks_of_others() -> None:
    """Its places take more bits."""
    rows, draw = hidden_rows([50, 6000, 4096], [20, 700, 30]), draw_for(3)
    together = by_example(rows, draw_masks(rows, 0.3, USUAL, draw))
    assert [len(chosen) for _, chosen, _ in together] == [15, 1800, 1229]
    alone = hidden_rows([50], [20])
    alone = replace(alone, pieces=rows.pieces[:50], labels=rows.labels[:2])
    assert by_example(alone, draw_masks(alone, 0.3, USUAL, replace(draw, keys=draw.keys[:1]))) == together[:1]


def test_a_higher_rate_only_takes_more_of_the_same_ranking() -> None:
    rows, draw = hidden_rows([50] * 200, [20] * 200), draw_for(200)
    few, many = (set(draw_masks(rows, rate, USUAL, draw).chosen.tolist()) for rate in (0.15, 0.4))
    assert few < many
    assert (len(few), len(many)) == (200 * round(0.15 * 50), 200 * 20)


def test_shares_and_places_are_fair() -> None:
    """Within four standard deviations of what a fair draw has, for each place, and for pairs of places."""
    count, length, boundary = 20_000, 24, 10
    rows = hidden_rows([length] * count, [boundary] * count)
    masked = draw_masks(rows, 0.25, USUAL, draw_for(count))
    now, chosen = masked.pieces[masked.chosen], (masked.chosen % length).reshape(count, -1)
    shares = [(now == MASK).mean(), ((now != MASK) & (now != masked.labels)).mean(), (now == masked.labels).mean()]
    for found, share in zip(shares, USUAL, strict=True):
        assert abs(found - share) < 4 * np.sqrt(share * (1 - share) / len(now)) + 0.1 / VOCABULARY
    candidates, taken = length - 3, chosen.shape[1]
    holds = np.zeros((count, length), bool)
    np.put_along_axis(holds, chosen, True, axis=1)
    usual = taken / candidates
    frequent = np.delete(holds, [0, boundary - 1, length - 1], axis=1)
    assert abs(frequent.mean(0) - usual).max() < 4 * np.sqrt(usual * (1 - usual) / count)
    together = taken * (taken - 1) / (candidates * (candidates - 1))
    pairs = (frequent.T.astype(float) @ frequent) / count
    off = pairs[~np.eye(candidates, dtype=bool)]
    assert abs(off - together).max() < 4.5 * np.sqrt(together * (1 - together) / count)  # of 210 pairs


def test_random_pieces_are_of_the_whole_vocabulary() -> None:
    rows = hidden_rows([60] * 4000, [60] * 4000)
    masked = draw_masks(rows, 0.5, Split(0, 1, 0), draw_for(4000))
    found = np.bincount(masked.pieces[masked.chosen], minlength=VOCABULARY)
    usual = len(masked.chosen) / VOCABULARY
    assert len(found) == VOCABULARY
    assert ((found - usual) ** 2 / usual).sum() < VOCABULARY + 4 * np.sqrt(2 * VOCABULARY)


def test_an_example_of_one_candidate_has_it() -> None:
    rows = hidden_rows([8], [8])
    alone = replace(rows, lengths=np.array([3]), pieces=np.array([CLS, 9, SEP]), boundaries=np.array([3]))
    assert count_masked(3, 0.15) == 1
    assert choose_places(alone, np.array([1]), number_places(draw_for(1).keys, 3), np.array([2]))[1].tolist() == [1]
