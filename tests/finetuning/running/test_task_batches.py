"""Batches have every item once an epoch, in an order that neither ranks nor stops change; activations that are kept are
those that would be computed; rows of different lengths beside lists of lists; and inputs of byte-level BPE as
transformers makes them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fine_tuned_models import LENGTHS, head_of, items_of
from support.transformers_models import SHAPE
from transformers import AutoTokenizer

from benchmarks.finetuning_sides import open_context
from data_prep.common.arrays import Array
from data_prep.common.launchers import World
from data_prep.vocabulary.kinds.bytelevel import KIND
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.inputs import Cutter, Encoded, Items, Ragged, Sequences
from finetuning.model.features import EncoderWeights, FeatureModel
from finetuning.running import outputs
from finetuning.running.batches import TaskBatches, TrainingBatches, make_evaluation_batches, pack, split_by_pieces
from finetuning.running.outputs import KeptItems
from finetuning.settings import Features, FineTuning
from pretraining.architectures.weights import Kind
from pretraining.engine.step import GivenUpError
from pretraining.model.batch import CPU
from pretraining.processes.context import Context
from pretraining.scoring.sentences import SentenceCutter

few = hypothesis.settings(max_examples=20)


@dataclass(frozen=True)
class Given(Items):
    """Items that are in memory."""

    encoded: Encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def encode(self, numbers: Array) -> Encoded:
        return self.encoded.take(numbers)


def counted(count: int) -> Given:
    """Items of different lengths whose pieces are their own numbers."""
    pieces = Ragged.from_rows([np.full(2 + number % 7, number, np.int32) for number in range(count)])
    return Given(Encoded(Sequences(pieces, pieces.lengths), Ragged.from_table(np.arange(count)[:, None])))


def steps_of(count: int, start: int = 0, rank: int = 0, ranks: int = 1, **values: Any) -> list[TaskBatches]:
    batches = TrainingBatches(counted(count), FineTuning.model_validate({"epochs": 1.0, **values}), rank, ranks)
    return [step for step, _ in batches.iterate(start)]


def items_in(step: TaskBatches) -> list[int]:
    """The items that a rank learns from in a step."""
    return [int(label) for batch in step.micro if batch.labels is not None for label in batch.labels]


def drawn(count: int, start: int = 0, rank: int = 0, ranks: int = 1, **values: Any) -> list[list[int]]:
    return [items_in(step) for step in steps_of(count, start, rank, ranks, **values)]


@few
@given(st.integers(1, 100), st.integers(1, 9), st.integers(1, 3), st.data())
def test_every_epoch_has_every_item_once_also_where_a_run_goes_on(
    count: int, batch: int, epochs: int, data: st.DataObject
) -> None:
    steps = drawn(count, batch=batch, epochs=float(epochs))
    each = -(-count // batch)
    for epoch in range(epochs):
        assert sorted(chain(*steps[epoch * each : (epoch + 1) * each])) == list(range(count))
    start = data.draw(st.integers(0, len(steps)))
    assert drawn(count, start, batch=batch, epochs=float(epochs)) == steps[start:]


@few
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_ranks_share_the_batch_of_one_rank(count: int, batch: int, ranks: int, micro_batch: int) -> None:
    """A rank without items in a batch, which is smaller than the number of ranks, computes all the same."""
    together = [steps_of(count, 0, rank, ranks, batch=batch, micro_batch=micro_batch) for rank in range(ranks)]
    for step, alone in zip(zip(*together, strict=True), drawn(count, batch=batch), strict=True):
        assert sorted(chain(*map(items_in, step))) == sorted(alone)
        assert len({len(batches.micro) for batches in step}) == 1
        assert {batches.labels for batches in step} == {len(alone)}


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    first, other = (drawn(500, batch=5, epochs=2.0, seed=seed) for seed in (1, 2))
    assert first[:100] != first[100:]
    assert first[:100] != other[:100]


def test_lengths_are_mixed_as_they_come() -> None:
    """Where they tell classes apart, a batch of like lengths would have one class."""
    assert min(len({2 + item % 7 for item in step}) for step in drawn(64 * 16, batch=16)) >= 4


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 9), (2, 6), (3, 4), (4, 3)])
def test_ranks_and_micro_batches_have_equal_work(ranks: int, micro_batch: int) -> None:
    """Lengths lie between 2 and 8: two hands of cards that are dealt in order differ by one card's range at most."""
    steps = [steps_of(36 * 4, 0, rank, ranks, batch=36, micro_batch=micro_batch) for rank in range(ranks)]
    for step in zip(*steps, strict=True):
        pieces = [len(batch.pieces) for rank in step for batch in rank.micro]
        assert max(pieces) - min(pieces) <= 8 - 2


@few
@given(st.integers(1, 100), st.integers(1, 4))
def test_evaluation_has_every_item_and_ranks_meet_as_often(count: int, ranks: int) -> None:
    with patch("finetuning.running.batches.PIECES", 20):
        batches = [list(make_evaluation_batches(counted(count), rank, ranks)) for rank in range(ranks)]
    assert len({len(own) for own in batches}) == 1
    assert {int(number) for own in batches for numbers, _ in own for number in numbers} == set(range(count))


@few
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=40))
def test_batches_for_evaluation_are_bounded(lengths: list[int]) -> None:
    batches = split_by_pieces(np.arange(len(lengths)), np.array(lengths))
    assert np.array_equal(np.concatenate(batches), np.arange(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[item] for item in batch) <= 8192 for batch in batches)


# Activations


def model_of(kind: Kind = "classes", seed: int = 1) -> FeatureModel:
    encoders = [EncoderWeights(SHAPE.change_learning(sees=sees), {}).fill_missing(seed) for sees in ("before", "after")]
    return FeatureModel(encoders, head_of(kind), Features(layers="mix", hidden=8)).eval()


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context(CPU) as opened:
        yield opened


def keep(
    items: Items, model: FeatureModel, context: Context, limit: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Items, str]:
    """What is kept of a split, and what is said of it."""
    said: list[str] = []
    with patch.object(outputs, "KEPT_GB", limit):
        found = outputs.keep_activations({"train": items}, model.frozen, dtype, context, said.append)
    return found["train"], "".join(said)


@pytest.mark.parametrize("kind", ["classes", "choice", "tags", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_would_be_computed(kind: Kind, dtype: torch.dtype, context: Context) -> None:
    model, items = model_of(kind).to(dtype), Given(items_of(kind))
    found, _ = keep(items, model, context, dtype=dtype)
    chosen = np.array([2, 0, 3, 2])
    given, computed = pack(found.encode(chosen), np.arange(4), chosen), pack(items.encode(chosen), np.arange(4), chosen)
    assert given.kept is not None
    rows = given.kept()
    assert rows.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(rows, model.frozen.compute_rows(computed, dtype))
        torch.testing.assert_close(model.logits(given), model.logits(computed), rtol=1e-5, atol=1e-6)


def test_items_of_many_batches_have_their_own(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a signal stops it."""
    monkeypatch.setattr("finetuning.running.batches.PIECES", 7)
    monkeypatch.setattr("finetuning.running.batches.EVALUATED_TOGETHER", 3)
    model, items = model_of(), Given(items_of("classes"))
    found, _ = keep(items, model, context)
    for numbers, batch in make_evaluation_batches(found):
        assert batch.kept is not None
        torch.testing.assert_close(batch.kept(), model.frozen.compute_rows(replace(batch, kept=None), torch.float32))
        assert len(numbers) == batch.items
    asked = iter([False, False, True])
    monkeypatch.setattr(context.control, "stop_requested_anywhere", lambda: next(asked))
    with pytest.raises(GivenUpError):
        keep(items, model, context)


def test_what_takes_too_much_on_a_machine_is_computed_again(context: Context) -> None:
    model, items = model_of(), Given(items_of("classes"))
    size = sum(LENGTHS) * 3 * 64 * 4 / 1e9  # pieces, layers, both widths, fp32
    found, said = keep(items, model, context, limit=size - 1e-9)
    assert found is items
    assert said.startswith(f"activations of train take {size:.3g} GB of memory, more than ")
    assert "computed again in every epoch" in said
    assert isinstance(keep(items, model, context, limit=size)[0], KeptItems)
    two = replace(context, world=World(size=2, local_size=2))
    assert keep(items, model, two, limit=2 * size - 1e-9)[0] is items


# Rows of different lengths


@few
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.data())
def test_stretches_of_rows_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    begins = [data.draw(st.integers(0, len(rows[number]))) for number in wanted]
    ends = [data.draw(st.integers(begin, len(rows[number]))) for number, begin in zip(wanted, begins, strict=True)]
    ragged = Ragged.from_rows([np.array(row, np.int64) for row in rows])
    numbers, first, last = (np.array(values, np.int64) for values in (wanted, begins, ends))
    assert list_rows(ragged.take(numbers)) == [rows[number] for number in wanted]
    found = list_rows(ragged.take_stretches(numbers, first, last))
    assert found == [rows[number][begin:end] for number, begin, end in zip(wanted, begins, ends, strict=True)]


def list_rows(found: Ragged) -> list[Any]:
    return [found.row(number).tolist() for number in range(len(found))]


# Byte-level BPE


FIRST, SECOND = ["The naïve river.", "It isn't far!"], ["A bank, 1990.", "the river's bank"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    first, others = zip(*(text.split(" ", 1) for text in (*FIRST, *SECOND)), strict=True)
    words = [*first, *(f" {word}" for text in others for word in text.split())]
    return KIND.train(dict.fromkeys(words, 5), 320, cased=True)


def test_texts_and_pairs_are_laid_out_as_by_transformers(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """RoBERTa has two marks between the texts of a pair; words of a list have a blank before each; offsets are those of
    the words without blanks."""
    vocabulary.write(tmp_path)
    theirs, cutter = AutoTokenizer.from_pretrained(tmp_path), Cutter(vocabulary)
    first, second = cutter.cut_texts(FIRST), cutter.cut_texts(SECOND)
    assert list_rows(cutter.lay_out(first, None, 64).pieces) == theirs(FIRST)["input_ids"]
    laid = cutter.lay_out(first, second, 64)
    assert list_rows(laid.pieces) == theirs(FIRST, SECOND)["input_ids"]
    for row, start, text in zip(list_rows(laid.pieces), laid.second.tolist(), SECOND, strict=True):
        assert row[start:] == theirs(text)["input_ids"][1:]
    short = theirs(FIRST, SECOND, truncation="longest_first", max_length=14)["input_ids"]
    assert cutter.lay_out(first, second, 14).pieces.lengths.tolist() == [min(14, len(row)) for row in short]
    ids, offsets = cutter.cut_with_offsets(FIRST)
    expected = theirs(FIRST, add_special_tokens=False, return_offsets_mapping=True)
    assert list_rows(ids) == expected["input_ids"]
    assert list_rows(offsets) == [[list(each) for each in row] for row in expected["offset_mapping"]]
    path, words = tmp_path / "tokenizer.json", ["The", "river", "'s", "naïve", "bank"]
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert cutter.cut_words(words).values.tolist() == wanted


def test_long_words_are_cut_as_in_shards_by_every_way_to_read_them() -> None:
    """With offsets, without numba, and for scores; data in ASCII stays unknown."""
    table = WordPiece((*SPECIAL, "a", "##a", "ก", "ที่", "##ก", "##ท", "##ี", "##่"), cased=True)
    texts = ["ก" * 99 + "ที่" * 40, "a" * 150, "a " + "ก" * 101]
    cutter, unknown = Cutter(table), table.special.unk
    ids, offsets = cutter.cut_with_offsets(texts)
    assert list_rows(cutter.cut_texts(texts)) == list_rows(ids)
    assert [row.count(unknown) for row in list_rows(ids)] == [0, 1, 0]
    assert [row[-1][1] for row in list_rows(offsets)] == [len(text) for text in texts]
    begins = [start for id, (start, _) in zip(list_rows(ids)[0], list_rows(offsets)[0], strict=True) if id in (7, 8)]
    assert begins == [0, 99, 198]
    assert SentenceCutter(table).cut_texts(texts).pieces.tolist().count(unknown) == 1


def test_sentences_are_scored_with_their_marks(vocabulary: Vocabulary) -> None:
    special, cut = vocabulary.special, SentenceCutter(vocabulary).cut_texts(FIRST)
    assert cut.pieces[cut.starts].tolist() == [special.cls] * 2
    assert cut.pieces[np.cumsum(cut.lengths) - 1].tolist() == [special.sep] * 2
    assert vocabulary.split_at_masks("The <mask>, or  <mask>") == ["The", ", or", ""]
