"""Finds a training example in a folder of shards, finished or not, with what is known of its document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.common.errors import UserError
from data_prep.shards import DOCUMENTS, Manifest, ShardSet, is_unfinished, map_batches, read_shard
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary
from data_prep.work import WorkFolder


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
    return example, load_vocabulary(place.folder / VOCABULARY, cased)


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
            example = read_shard(folder / record.path).slice(row, 1).to_pylist()[0]
            return {**example, **_document(folder, example["document"])}, manifest.content["vocabulary"]["cased"]
        row -= record.rows
    raise AssertionError("the rows of the records add up to the total")


def _in_work_folder(place: Place) -> tuple[dict[str, Any], bool]:
    """Reads an example of an unfinished folder, before the global shuffle, and whether its text keeps case."""
    work = WorkFolder(place.folder)
    settings = work.read_plan()["settings"]
    length = min(settings["lengths"]) if place.length is None else place.length
    number = settings["duplicates"] if place.validation else place.duplicate
    row = place.index
    written = (place.folder / record["files"][0]["path"] for record in work.read_records(f"examples-{length}"))
    files = [path for path in sorted(written) if path.exists()]  # those of a length that is finished are gone
    for path in files:
        reader = map_batches(path)
        if not 0 <= number < reader.num_record_batches:
            break
        batch = reader.get_batch(number)
        if 0 <= row < batch.num_rows:
            return batch.slice(row, 1).to_pylist()[0], settings["cased"]
        row -= batch.num_rows
    raise UserError(
        f"{place.folder}: not finished, and no such example yet; "
        f"files of examples of length {length} so far: {len(files)}. Run shard.py again to continue"
    )


def _document(folder: Path, number: int) -> dict[str, Any]:
    """Reads the id, title and source of a document."""
    reader = map_batches(folder / DOCUMENTS)
    for index in range(reader.num_record_batches):
        batch: pa.RecordBatch = reader.get_batch(index)
        if number < batch.num_rows:
            return dict(batch.slice(number, 1).to_pylist()[0])
        number -= batch.num_rows
    return {}
