"""Mixtures: exact shares, wherever one begins to read, and each corpus in an order of its own."""

import os
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import refusal
from support.shards import CORPORA, make_three_corpora
from support.training import Place

from data_prep.arrow_files import read_shard
from pretraining.checkpoint.state import RunState
from pretraining.config.overrides import load_recipe
from pretraining.config.settings import Recipe
from pretraining.data.batches import step_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.data.mixing import NEVER, WHOLE, MixedOrder, Mixture, Slots, divide_whole, make_corpus_order
from pretraining.data.order import BatchOrder
from pretraining.training.phases import TrainingPhase
from pretraining.training.request import Request
from pretraining.training.skips import Skip

weights = st.lists(st.floats(1e-6, 1), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    folder = make_three_corpora(tmp_path_factory.getbasetemp())
    return Corpora.read([f"{name}={folder / name}" for name in CORPORA])


def make_slots(first: list[float], last: list[float], sequences: int) -> tuple[Slots, np.ndarray]:
    """Makes the slots of a phase whose shares move, and their exact shares, a row each."""
    whole = [tuple(divide_whole(each, WHOLE).tolist()) for each in (first, last)]
    slots = Mixture(Corpora(()), 32, *whole).make_slots(sequences)
    width = min(1000, max(1, sequences // 10))
    stairs = -(-sequences // width) if whole[0] != whole[1] else 1
    middle = (np.minimum(np.arange(sequences + 500) // width, stairs - 1) + 0.5)[:, None] / stairs
    return slots, np.array(whole[0]) * (1 - middle) + np.array(whole[1]) * middle


@settings(max_examples=40)
@given(first=weights, change=st.floats(0, 1), sequences=st.integers(1, 20_000), moves=st.booleans())
def test_any_prefix_is_within_one_sequence_of_the_shares(
    first: list[float], change: float, sequences: int, moves: bool
) -> None:
    last = [change * weight + (1 - change) * other for weight, other in zip(first, reversed(first), strict=True)]
    slots, exact = make_slots(first, last if moves else first, sequences)
    chosen = slots.take(0, len(exact))
    counts = np.cumsum(np.eye(len(first))[chosen], axis=0)
    rounding = 1e-6 * len(exact)  # shares are whole millionths
    assert abs(counts - np.cumsum(exact / WHOLE, axis=0)).max() < 1 + rounding


@settings(max_examples=20)
@given(weights, st.integers(0, 3 * WHOLE))
def test_shares_of_thousandths_are_exact_in_every_stretch_of_a_thousand(shares: list[float], start: int) -> None:
    thousandths = divide_whole(shares, 1000)
    slots = Slots(1000 * thousandths[None], NEVER)
    assert np.bincount(slots.take(start, 1000), minlength=len(shares)).tolist() == thousandths.tolist()


@pytest.mark.parametrize("last", [[0.5, 0.3, 0.2], [0.0, 0.3, 0.7]])
def test_what_is_read_from_the_middle_on_is_what_is_read_from_the_beginning(last: list[float]) -> None:
    """Also across the chunks that are kept, in which the shares stay or move."""
    sequences = 2 * WHOLE + 5000
    straight = make_slots([0.5, 0.3, 0.2], last, sequences)[0].take(0, sequences)
    for start in (0, 1, 999, 1000, 123_456, WHOLE - 7, WHOLE, 2 * WHOLE - 1, 2 * WHOLE + 4000):
        slots, _ = make_slots([0.5, 0.3, 0.2], last, sequences)
        assert slots.count(start).tolist() == np.bincount(straight[:start], minlength=3).tolist()
        assert np.array_equal(slots.take(start, 999), straight[start : start + 999])


def test_the_shares_of_a_short_phase_move_too() -> None:
    chosen = make_slots([1.0, 0.0], [0.0, 1.0], 40)[0].take(0, 40)
    assert [int(sum(chosen[start : start + 10])) for start in range(0, 40, 10)] == pytest.approx([1, 4, 6, 9], abs=1)


def test_the_slots_never_change_between_versions() -> None:
    """A run that was begun with an earlier version goes on with the same corpora."""
    found = make_slots([0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], 5000)[0]
    assert "".join(map(str, found.take(0, 30))) == "010201010201300120101020103010"
    assert "".join(map(str, found.take(4970, 30))) == "203123231032312312303213230123"


def list_raw_pieces(corpora: Corpora, number: int) -> dict[bytes, str]:
    """Reads the masked pieces of all training examples of length 32 of a corpus, and names the corpus by them."""
    part = corpora.parts[number]
    sets = [(key, shards) for key, shards in part.manifest.sets().items() if key.length == 32 and not key.validation]
    rows = [row for _, shards in sets for shard in shards for row in read_shard(part.folder / shard.path).to_pylist()]
    return {np.array(row["pieces"], np.int64).tobytes(): part.name for row in rows}


def test_batches_of_any_ranks_have_the_shares_and_read_each_corpus_in_turn(corpora: Corpora) -> None:
    """Counted from the pieces of the batches by what stands in the files; each example is read once in an epoch."""
    known = {key: name for number in range(3) for key, name in list_raw_pieces(corpora, number).items()}
    mixture = Mixture.choose(corpora, 32, {"wiki": 0.6, "books": 0.3, "code": 0.1})
    dataset = Dataset(mixture.corpora, 32)
    firsts = dataset.first_sets
    rows = [dataset.shard_rows[first:stop] for first, stop in pairwise(firsts)]
    orders = [make_corpus_order(7, name, 32, each) for name, each in zip(mixture.names, rows, strict=True)]
    order = BatchOrder(MixedOrder(5, mixture.make_slots(None), orders, firsts[:-1], [3, 5, 8]), 60)
    read: list[Counter[str]] = []
    for ranks in (1, 2, 3):
        seen = Counter[str]()
        examples = list[tuple[int, int]]()
        for step in range(10):
            for rank in range(ranks):
                for batch in step_batches(dataset, order, step, rank, ranks, 2).micro:
                    ends = np.cumsum(batch.lengths)
                    parts = np.split(batch.pieces.numpy(), ends[:-1])
                    seen.update(known[part.astype(np.int64).tobytes()] for part in parts)
                    examples += map(tuple, batch.examples.tolist())
        read.append(seen)
        assert len(set(examples)) == 600
    assert read == [Counter(wiki=360, books=180, code=60)] * 3


def test_sizes_and_a_temperature_give_shares(corpora: Corpora) -> None:
    sizes = {part.name: part.count_examples(32) for part in corpora.parts}
    for temperature in (None, 1.0, 0.3, 0.0):
        powers = {name: size ** (1.0 if temperature is None else temperature) for name, size in sizes.items()}
        mixture = Mixture.choose(corpora, 32, temperature=temperature)
        wanted = [WHOLE * powers[name] / sum(powers.values()) for name in mixture.names]
        assert mixture.first == mixture.last
        assert mixture.first == pytest.approx(wanted, abs=1)
        assert sum(mixture.first) == WHOLE
    assert Mixture.choose(corpora, 32, {"wiki": 1.0, "code": 0.0}).names == ["wiki"]


def test_what_cannot_be_one_run_is_refused(corpora: Corpora, tmp_path: Path) -> None:
    """Each in a line that names both folders, and all at once."""
    folder = corpora.folder.parent
    wiki, books = folder / "wiki", folder / "books"
    for words, fault in {
        (f"{wiki}", f"{books}"): "of several corpora each needs a name",
        (f"a={wiki}", f"a={books}"): f"--data a={books}: {wiki} has the same name",
        (f"a={wiki}", f"b={wiki}/"): "is the folder of a too",
        (f"a-b={wiki}",): f"--data a-b={wiki}: a name has letters",
        (f"={wiki}",): f"--data ={wiki}: is half a corpus; give NAME=FOLDER",
        ("wiki=",): "--data wiki=: is half a corpus",
        (f"a={wiki}", f"b={tmp_path / 'none'}"): f"--data b={tmp_path / 'none'}: no such folder",
    }.items():
        assert fault in refusal(Corpora.read, words)
    for change in (
        {"vocabulary": {"sha256": "other"}},
        {"vocabulary": {"cased": True}},
        {"settings": {"pairs": "none"}},
    ):
        [(table, values)] = change.items()
        part = corpora.parts[1]
        other = part.manifest.model_copy(update={table: getattr(part.manifest, table).model_copy(update=values)})
        [line] = Corpora((corpora.parts[0], type(part)("other", tmp_path, other))).find_differences()
        assert str(tmp_path) in line
        assert str(corpora.parts[0]) in line


def open_phase(corpora: Corpora, state: RunState, recipe: Recipe) -> TrainingPhase:
    context: Any = SimpleNamespace(device=torch.device("cpu"))
    mesh: Any = SimpleNamespace(data_rank=0, data_ranks=1)
    sizes: Any = SimpleNamespace(size_for=lambda phase: phase.micro_batch)
    return TrainingPhase(Request(recipe, corpora, Path("out")), context, mesh, state, [Skip(0, 2, 1, "bad")], sizes)


def read_phase(phase: TrainingPhase, state: RunState, steps: int) -> list[tuple[int, int, int]]:
    """Reads the examples of the first steps of a phase, and ends it."""
    state.phase_step = steps
    found = map(np.concatenate, zip(*(phase._order.examples(step) for step in range(steps)), strict=True))
    phase.finish(state)
    return list(zip(*(column.tolist() for column in found), strict=True))


def test_a_corpus_goes_on_from_phase_to_phase(corpora: Corpora, place: Place) -> None:
    """Also after batches that were left out, in the first of these phases; a phase that is opened again begins anew."""
    mix = ["--phases.0.mix", "{ wiki = 0.5, code = 0.5 }", "--phases.1.mix", "{ wiki = 0.25, code = 0.75 }"]
    recipe = load_recipe(place.recipe, [*mix, "--phases.1.length", "32"])
    state = RunState()
    first = read_phase(open_phase(corpora, state, recipe), state, 5)
    assert {name: each["sequences"] for name, each in state.corpora[0].items()} == {"wiki": 72, "code": 72}
    before = replace(state)
    state.begin_phase(1)
    second = read_phase(open_phase(corpora, state, recipe), state, 3)
    assert state.count_read("wiki", 32) == 72
    assert state.corpora[1]["code"]["sequences"] == 27
    assert len({*first, *second}) == 5 * 24 + 3 * 12
    phase = open_phase(corpora, before, recipe)
    assert read_phase(phase, before, 5) == first
    figures = open_phase(corpora, replace(state, phase_step=3), recipe).measure_reading(replace(state, phase_step=3))
    left_out = 24 / 2  # of a batch that no step reads
    assert figures["epochs/code"] == pytest.approx((99 - left_out) / corpora.parts[1].count_examples(32))


def test_two_hundred_corpora_start_without_shards_and_keep_few_files_open(
    corpora: Corpora, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, mapped, files = [tmp_path / f"c{number}" for number in range(200)], list[Path](), list[int]()
    for folder in folders:
        shutil.copytree(corpora.folder, folder, copy_function=os.link)

    def read_counted(path: Path) -> pa.RecordBatch:
        mapped.append(path)
        files.append(psutil.Process().num_fds())
        return read_shard(path)

    monkeypatch.setattr("pretraining.data.dataset.read_shard", read_counted)
    files.append(psutil.Process().num_fds())
    many = Corpora.read([f"{folder.name}={folder}" for folder in folders])
    phase = open_phase(many, RunState(), load_recipe(place.recipe, ["--phases.0.batch", "400"]))
    assert not mapped, "before the first batch"
    for step in range(3):
        step_batches(phase._dataset, phase._order, step)
    assert {path.relative_to(tmp_path).parts[0] for path in mapped} == {folder.name for folder in folders}
    assert len(mapped) < 3 * 200, "shards stay mapped from batch to batch"
    assert max(files) - files[0] <= 8
