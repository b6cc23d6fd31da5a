"""Shards of examples are mapped where they are needed, and no damage in them gets through."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pyarrow as pa
import pytest
from support.commands import assert_refusal
from support.damage import flip, truncate
from support.shards import make_many_shards

from data_prep.arrow_files import Lists, make_example_batch, read_shard, write_batches
from data_prep.common.arrays import smallest_type
from data_prep.common.errors import DamageError
from data_prep.common.files import FileRecord
from data_prep.shards import Manifest, example_schema
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import OPEN_SHARDS, Dataset, num_held_out
from pretraining.data.order import Examples
from pretraining.model.rows import Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_many_shards(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return Manifest.read(folder)


@pytest.fixture
def dataset(folder: Path, manifest: Manifest) -> Dataset:
    return Dataset(Corpora.one(folder, manifest), 32)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def examples(rows: Sequence[int], shard: int = 0) -> Examples:
    """Rows of a shard of the first duplicate."""
    row = np.array(rows)
    return Examples(np.zeros_like(row), np.full_like(row, shard), row)


def all_examples(dataset: Dataset) -> Examples:
    """Of all duplicates, in the order of the files."""
    parts = [(d, s, r) for d, rows in enumerate(dataset.shard_rows) for s, n in enumerate(rows) for r in range(n)]
    return Examples(*np.array(parts).T)


def rewrite(folder: Path, manifest: Manifest, number: int, change: Any, schema: pa.Schema | None = None) -> Manifest:
    """Writes a shard anew with changed columns, and the manifest that fits its bytes."""
    dataset = Dataset(Corpora.one(folder, manifest), 32)
    record = dataset.records[number]
    batch = read_shard(folder / record.path)
    masked = batch["masked"]
    flat = {name: np.array(batch[name]) for name in ("boundary", "random_next", "document")}
    flat |= {"pieces": np.array(batch["pieces"].values), "ends": np.array(batch["pieces"].offsets)[1:]}
    flat |= {name: np.array(masked.values.field(name)) for name in ("position", "piece")}
    flat["masked_ends"] = np.array(masked.offsets)[1:]
    change(flat)
    pieces, labels = Lists(flat["pieces"], flat["ends"]), Lists(flat["piece"], flat["masked_ends"])
    others = [flat[name] for name in ("boundary", "random_next", "document")]
    changed = make_example_batch(schema or batch.schema, pieces, flat["position"], labels, *others)
    new = write_batches(folder, record.path, changed.schema, [changed])
    return with_shards(manifest, lambda record: new if record.path == new.path else record)


def with_shards(manifest: Manifest, change: Callable[[FileRecord], FileRecord]) -> Manifest:
    """A manifest with other records of some shards."""
    figures = [one.model_copy(update={"shards": [change(record) for record in one.shards]}) for one in manifest.figures]
    return manifest.model_copy(update={"figures": figures})


@pytest.mark.parametrize("vocabulary_size", [30522, 70000])
def test_larger_vocabularies_have_wider_types(vocabulary_size: int, copied: Path) -> None:
    """And ids that fill them."""
    small = Manifest.read(copied)
    expected = Dataset(Corpora.one(copied, small), 32).read(examples([5, 0, 2]))
    more = vocabulary_size - small.vocabulary_size
    schema = example_schema(32, vocabulary_size, small.num_documents)

    def widen(flat: dict[str, Any]) -> None:
        for name in ("pieces", "piece"):
            flat[name] = (flat[name].astype(np.int64) + more).astype(smallest_type(vocabulary_size - 1))

    manifest = rewrite(copied, small, 0, widen, schema)
    vocabulary = small.vocabulary.model_copy(update={"size": vocabulary_size})
    wide = Corpora.one(copied, manifest.model_copy(update={"vocabulary": vocabulary}))
    found = Dataset(wide, 32).read(examples([5, 0, 2]))
    for name, moved in (("pieces", more), ("labels", more), ("positions", 0)):
        assert np.array_equal(getattr(found, name), getattr(expected, name) + moved)


def test_storage_that_is_gone_for_a_while_costs_time_alone(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset(Corpora.one(copied), 32)
    away = copied.rename(copied.with_name("away"))
    monkeypatch.setattr("data_prep.common.files.time.sleep", lambda _: away.exists() and away.rename(copied))
    assert len(dataset.read(examples([0, 1])).lengths) == 2
    assert not away.exists(), "it came back while the reader waited"


def test_few_shards_are_open_at_a_time(dataset: Dataset) -> None:
    def mapped() -> int:
        return sum("shard-" in each.path for each in psutil.Process().memory_maps())

    assert len(dataset.records) > OPEN_SHARDS
    before = mapped()
    dataset.read(all_examples(dataset))
    assert mapped() - before <= OPEN_SHARDS


def test_a_length_or_a_validation_that_is_not_there_is_refused(folder: Path, manifest: Manifest) -> None:
    told = r"no training examples of length 128 \(lengths there: 32, 64\).*--lengths 128"
    assert_refusal(told, Dataset, Corpora.one(folder, manifest), 128)
    none = with_shards(manifest, lambda record: replace(record, rows=0) if "validation" in record.path else record)
    assert num_held_out(none, 32) == 0
    told = r"no examples held out .* of length 32 .*make shards with: .* --validation"
    assert_refusal(told, Dataset, Corpora.one(folder, none), 32, validation=True)
    assert (
        num_held_out(manifest, 32) == sum(Dataset(Corpora.one(folder, manifest), 32, validation=True).shard_rows[0]) > 0
    )
    assert num_held_out(manifest, 128) == 0


@pytest.mark.parametrize(
    ("damage", "rank", "message"),
    [
        (Path.unlink, 0, "missing"),
        (flip, 1, "its SHA-256 .*; copy it again"),
        (truncate, 0, r"[\d,]+ bytes, its record says"),
        (truncate, 1, r"[\d,]+ bytes, its record says"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), 0, "not a whole Arrow file"),
    ],
)
def test_damage_is_refused_at_first(damage: Callable[[Path], object], rank: int, message: str, copied: Path) -> None:
    """Rank 1 alone compares this one with its checksum; all that could crash is refused by every rank."""
    manifest = Manifest.read(copied)
    damage(copied / Dataset(Corpora.one(copied, manifest), 32).records[1].path)
    dataset = Dataset(Corpora.one(copied, manifest), 32, rank=rank, ranks=2)
    dataset.read(examples([0]))
    with pytest.raises(DamageError, match=rf"duplicate-0/shard-00001\.arrow: {message}"):
        dataset.read(examples([0], shard=1))


def test_the_ranks_share_the_checking(copied: Path) -> None:
    manifest = Manifest.read(copied)
    for number in range(4):
        flip(copied / Dataset(Corpora.one(copied, manifest), 32).records[number].path)
    for rank in range(4):
        dataset = Dataset(Corpora.one(copied, manifest), 32, rank=rank, ranks=4)
        for number in range(4):
            with pytest.raises(DamageError) if number == rank else nullcontext():
                dataset._shard(number)


def test_a_shard_is_checked_once(dataset: Dataset) -> None:
    with patch.object(FileRecord, "check", autospec=True, side_effect=FileRecord.check) as check:
        for _ in range(2):
            dataset.read(all_examples(dataset))
    assert sorted(call.args[0].path for call in check.call_args_list) == sorted(each.path for each in dataset.records)


def set_piece(flat: dict[str, Any], name: str, row_ends: str, row: int, value: int) -> None:
    """Changes the last of a row's values."""
    flat[name][flat[row_ends][row] - 1] = value


DAMAGES = {
    "a piece beyond the vocabulary": lambda flat: set_piece(flat, "pieces", "ends", 17, 255),
    "a masked piece beyond the vocabulary": lambda flat: set_piece(flat, "piece", "masked_ends", 17, 255),
    "a masked position beyond its end": lambda flat: set_piece(flat, "position", "masked_ends", 17, 32),
    "a boundary beyond its end": lambda flat: flat["boundary"].__setitem__(17, 33),
    "no possible length": lambda flat: flat["ends"].__setitem__(17, 10),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_values_that_could_crash_a_kernel_are_named(what: str, copied: Path) -> None:
    """They can have the right checksum: whoever wrote them may have been wrong."""
    assert Manifest.read(copied).vocabulary_size < 255
    manifest = rewrite(copied, Manifest.read(copied), 2, DAMAGES[what])
    dataset = Dataset(Corpora.one(copied, manifest), 32)
    rows = [3, 4, 16, 17, 19]
    with pytest.raises(DamageError, match=rf"duplicate-0/shard-00002\.arrow: example 17 has {what}"):
        dataset.read(examples(rows, shard=2))
    dataset.read(examples(rows[:2], shard=2))


def test_columns_other_than_promised_are_refused(copied: Path) -> None:
    manifest = Manifest.read(copied)
    record = Dataset(Corpora.one(copied, manifest), 32).records[0]
    other = pa.record_batch({"text": ["a", "b"]})
    new = write_batches(copied, record.path, other.schema, [other])
    said = replace(new, rows=record.rows)
    changed = with_shards(manifest, lambda record: said if record.path == said.path else record)
    with pytest.raises(DamageError, match=r"shard-00000\.arrow: 2 rows of \['text'\]; its manifest promises"):
        Dataset(Corpora.one(copied, changed), 32).read(examples([0]))


def test_a_shard_read_as_a_slice_gives_its_own_rows(folder: Path, manifest: Manifest, monkeypatch: Any) -> None:
    """Arrow's columns may begin in the middle of their buffers."""
    dataset = Dataset(Corpora.one(folder, manifest), 32)
    whole = dataset.read(examples([3, 4, 9, 11, 12]))
    rows = dataset.records[0].rows
    monkeypatch.setattr("pretraining.data.dataset.read_shard", lambda path: read_shard(path).slice(3))
    record = FileRecord(dataset.records[0].path, dataset.records[0].size, rows - 3, dataset.records[0].sha256)
    sliced = Dataset(Corpora.one(folder, manifest), 32)
    sliced.records[0] = record
    part = sliced.read(examples([0, 1, 6, 8, 9]))
    for field in fields(Rows):
        if field.name != "where":
            assert np.array_equal(getattr(part, field.name), getattr(whole, field.name)), field.name
