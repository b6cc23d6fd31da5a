"""Finds a training example in a folder of shards, finished or not, with what is known of its document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.common.errors import DamageError, UserError
from data_prep.common.forms import find_fault, whole
from data_prep.shards import (
    DOCUMENTS,
    DOCUMENTS_SCHEMA,
    FILE_FORM,
    PLAN,
    Manifest,
    ShardSet,
    example_schema,
    is_unfinished,
    map_batches,
    read_batch,
    read_shard,
)
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary
from data_prep.work import WorkFolder

SIZES = (1 << 8, 1 << 16, 1 << 32, 1 << 62)  # of vocabularies and corpora, one for each type of their numbers
PLAN_FORM = {"settings": {"lengths": [whole(1)], "duplicates": whole(1), "cased": bool}}
"""What is relied on of the plan of a folder that is not finished."""


@dataclass(frozen=True)
class Place:
    """Where an example is in a folder of shards."""

    folder: Path
    length: int | None
    """The length of the examples; None stands for the shortest there is."""
    index: int
    """The number of the example in its set, from 0."""
    duplicate: int
    validation: bool


def find_example(place: Place) -> tuple[dict[str, Any], Vocabulary]:
    """Reads an example and the vocabulary that its pieces are of; raises UserError where there is no such example."""
    example, cased = _in_work_folder(place) if is_unfinished(place.folder) else _in_shards(place)
    vocabulary = load_vocabulary(place.folder / VOCABULARY, cased)
    largest = max([*example["pieces"], *(mask["piece"] for mask in example["masked"])], default=0)
    if largest >= len(vocabulary):
        raise DamageError(f"{place.folder}: example {place.index} has a piece beyond its {VOCABULARY}")
    return example, vocabulary


def _in_shards(place: Place) -> tuple[dict[str, Any], bool]:
    """Reads an example of a finished folder, and whether its text keeps case."""
    manifest, folder = Manifest.read(place.folder), place.folder
    sets = manifest.sets()
    length = min(shards.length for shards in sets) if place.length is None else place.length
    chosen = ShardSet(length, 0 if place.validation else place.duplicate, place.validation)
    if chosen not in sets:
        raise UserError(f"{folder}: no {chosen.folder}; there is {', '.join(shards.folder for shards in sets)}")
    total = sum(record.rows for record in sets[chosen])
    if not 0 <= place.index < total:
        raise UserError(f"--index {place.index}: {chosen.folder} has {total:,} examples, 0 to {total - 1}")
    row = place.index
    for record in sets[chosen]:
        if row < record.rows:
            batch = read_shard(record.find(folder), full=True)
            schema = example_schema(length, manifest.vocabulary_size, manifest.content["corpus"]["documents"])
            if batch.num_rows != record.rows or batch.schema != schema:
                raise DamageError(f"{folder / record.path}: its rows or columns are not those of its record")
            example = _read_row(batch, row, length, folder / record.path)
            return {**example, **_document(folder, example["document"])}, manifest.content["vocabulary"]["cased"]
        row -= record.rows
    raise AssertionError("the rows of the records add up to the total")


def _read_row(batch: pa.RecordBatch, row: int, length: int, path: Path) -> dict[str, Any]:
    """Reads a row as an example; raises DamageError where it cannot be one."""
    for name in ("pieces", "masked"):
        size = batch[name].offsets[row + 1].as_py() - batch[name].offsets[row].as_py()
        if size > length:
            raise DamageError(f"{path}: example {row} has {size:,} {name}, longer than its length")
    example: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
    return example


def _in_work_folder(place: Place) -> tuple[dict[str, Any], bool]:
    """Reads an example of an unfinished folder, before the global shuffle, and whether its text keeps case."""
    work = WorkFolder(place.folder)
    plan = work.read_plan()
    if fault := find_fault(plan, PLAN_FORM):
        raise DamageError(f"{place.folder / PLAN}: {fault}: it was edited or is damaged")
    settings = plan["settings"]
    if not settings["lengths"]:
        raise DamageError(f"{place.folder / PLAN}: settings.lengths is empty: it was edited or is damaged")
    length = min(settings["lengths"]) if place.length is None else place.length
    number = settings["duplicates"] if place.validation else place.duplicate
    row = place.index
    records = work.read_records(f"examples-{length}")
    if fault := find_fault(records, [{"files": [FILE_FORM]}]):
        raise DamageError(f"{work.path}: examples-{length}{fault}: it was edited or is damaged")
    written = (place.folder / record["files"][0]["path"] for record in records)
    files = [path for path in sorted(written) if path.exists()]  # those of a length that is finished are gone
    for path in files:
        reader = map_batches(path)
        if not 0 <= number < reader.num_record_batches:
            break
        batch = read_batch(reader, number, path)
        if not _is_of_examples(batch.schema, length):
            raise DamageError(f"{path}: its columns are not those of examples")
        if 0 <= row < batch.num_rows:
            return _read_row(batch, row, length, path), settings["cased"]
        row -= batch.num_rows
    raise UserError(
        f"{place.folder}: not finished, and no such example yet; "
        f"files of examples of length {length} so far: {len(files)}. Run shard.py again to continue"
    )


def _is_of_examples(schema: pa.Schema, length: int) -> bool:
    """Tells whether files of an unfinished folder have the columns of examples, and one by which they are shuffled."""
    columns = pa.schema(list(schema)[:-1])
    return any(columns == example_schema(length, size, documents) for size in SIZES for documents in SIZES)


def _document(folder: Path, number: int) -> dict[str, Any]:
    """Reads the id, title and source of a document."""
    path = folder / DOCUMENTS
    reader = map_batches(path)
    for index in range(reader.num_record_batches):
        batch = read_batch(reader, index, path)
        if batch.schema != DOCUMENTS_SCHEMA:
            raise DamageError(f"{path}: its columns are not those of documents")
        if number < batch.num_rows:
            return dict(batch.slice(number, 1).to_pylist()[0])
        number -= batch.num_rows
    return {}
