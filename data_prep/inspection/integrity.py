"""Finds what is damaged in a folder of shards: every checksum, count and schema, and examples that are not well formed.

The checks yield faults, sentences that name the damaged file. They print what is sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from data_prep.arrow_files import map_batches, name_damage, read_batch
from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord
from data_prep.inspection.lookup import read_examples, read_kept
from data_prep.origins import find_origins_of_folder
from data_prep.seals import require_seal
from data_prep.shards import DOCUMENTS, DOCUMENTS_SCHEMA, KEPT, MANIFEST, REPORT, KeptFile, Manifest, SetFigures
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.tokens import hash_documents, read_corpus
from data_prep.vocabulary.vocabulary import Special
from data_prep.work import WorkFolder

Faults = Iterator[str]
CONSUMED = ("examples-", "merged-", "unique", "distinct", "limited")
"""Beginnings of the names of steps whose files are deleted one by one, once a later step has replaced them."""


def find_faults_in_finished(folder: Path, manifest: Manifest, console: Console) -> Faults:
    """Finds all that is wrong with a finished folder."""
    yield from _faults(require_seal, folder / MANIFEST)
    for record in manifest.tables:
        yield from _faults(record.check, folder)
    if manifest.figures:
        yield from _faults(_check_documents, folder, manifest)
    yield from _kept_faults(folder, manifest, console)
    special = None
    with suppress(UserError):  # the vocabulary is damaged too
        special = load_vocabulary(folder, manifest.vocabulary.cased).special
    for figures in manifest.figures:
        yield from _set_faults(folder, manifest, figures, special, console)
    known = {MANIFEST, REPORT, *(record.path for record in (*manifest.files(), *manifest.kept))}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and str(path.relative_to(folder)) not in known:
            console.print(f"note: {path} is not in the manifest; it is not used", markup=False)


def find_faults_in_unfinished(folder: Path, console: Console) -> Faults:
    """Finds all that is wrong with what a run that did not finish has left."""
    console.print(f"{folder} is not finished", markup=False)
    work = WorkFolder(folder)
    for step in work.list_steps():
        try:
            with name_damage(work.path, f"{step}: cannot be read"):
                records = work.read_records(step)
        except DamageError as error:
            yield str(error)
            continue
        finished = work.is_finished(step)
        if records or finished:
            console.print(f"{step}: {'finished' if finished else 'begun'}, {len(records)} tasks done")
        deleted = finished and (step.startswith(CONSUMED) or not (work.path / step).exists())
        for file in (file for record in records for file in record.files):
            if not deleted or (folder / file.path).exists():
                yield from _faults(file.check, folder)


def _faults(check: Callable[..., None], *arguments: Any) -> Faults:
    """Turns the damage that a check raises into a fault, so that all damage is found and not only the first."""
    try:
        check(*arguments)
    except DamageError as error:
        yield str(error)


def _check_documents(folder: Path, manifest: Manifest) -> None:
    """Raises DamageError unless the table of documents has the rows and columns that it must have."""
    path = folder / DOCUMENTS
    reader = map_batches(path)
    with name_damage(path, "cannot be read"):
        rows = sum(read_batch(reader, number, path).num_rows for number in range(reader.num_record_batches))
    promised = manifest.num_documents
    if reader.schema != DOCUMENTS_SCHEMA or rows != promised:
        raise DamageError(f"{path}: {rows:,} documents of {reader.schema.names}; its manifest says {promised:,}")


def _kept_faults(folder: Path, manifest: Manifest, console: Console) -> Faults:
    """Finds what is wrong with the documents in pieces."""
    size = manifest.vocabulary_size
    faults = [fault for record in manifest.kept for fault in _faults(_check_kept, folder, record, size)]
    yield from faults
    if number := len(manifest.kept):
        rows, pieces = (sum(getattr(record, name) for record in manifest.kept) for name in ("rows", "pieces"))
        counts = f"{rows:,} documents, {pieces:,} pieces"
        console.print(f"{KEPT}: {number - len(faults)} of {number} files right, {counts}", markup=False)
    if manifest.origins:
        where = f"documents are those of {', '.join(origin.folder for origin in manifest.origins)}, to be checked there"
        try:
            list(find_origins_of_folder(folder, str(folder)))
        except UserError as error:  # the shards are as right as before
            where = str(error)
        console.print(f"note: {where}", markup=False)


def _check_kept(folder: Path, record: KeptFile, vocabulary_size: int) -> None:
    """Raises DamageError unless a file of documents has the columns and counts of its record, and its own digests."""
    record.check(folder)
    path = folder / record.path
    with name_damage(path, "cannot be read"):
        batch = read_kept(path, record.rows, vocabulary_size)
        corpus = read_corpus(path, 0)
    counts = (batch.num_rows, len(corpus.sentence_ends), len(corpus.pieces))
    if counts != (record.rows, record.sentences, record.pieces):
        raise DamageError(f"{path}: {counts} documents, sentences and pieces; its record says other numbers")
    if (hash_documents(corpus.pieces, corpus.sentence_ends, corpus.document_ends) != np.asarray(batch["digest"])).any():
        raise DamageError(f"{path}: a digest is not that of its document")


def _set_faults(
    folder: Path, manifest: Manifest, figures: SetFigures, special: Special | None, console: Console
) -> Faults:
    """Finds damage of the shards of one set, and counts that differ from the manifest."""
    totals: Counter[str] = Counter()

    def check(record: FileRecord) -> None:
        record.check(folder)
        path = folder / record.path
        with name_damage(path, "cannot be read"):
            batch = read_examples(path, manifest, figures.length, record.rows)
            if fault := find_example_fault(batch, figures.length, manifest, special):
                raise DamageError(f"{path}: {fault}")
            totals.update(
                examples=batch.num_rows,
                pieces=len(batch["pieces"].values),
                masked=len(batch["masked"].values),
                random_next=batch["random_next"].true_count,
            )

    faults = [fault for record in figures.shards for fault in _faults(check, record)]
    for name, count in totals.items() if not faults else ():
        if count != (promised := getattr(figures, name)):
            yield f"{folder / figures.set.folder}: {count:,} {name}, its manifest says {promised:,}"
    yield from faults
    number, counts = len(figures.shards), f"{totals['examples']:,} examples, {totals['pieces']:,} pieces"
    console.print(f"{figures.set.folder}: {number - len(faults)} of {number} shards right, {counts}")


def find_example_fault(batch: pa.RecordBatch, length: int, manifest: Manifest, special: Special | None) -> str | None:
    """Describes the first example that is not well formed; None if all are.

    Where whole words are masked, an example of nothing but long words may have no mask.
    """
    pieces, offsets = np.asarray(batch["pieces"].values), np.asarray(batch["pieces"].offsets).astype(np.int64)
    masked, num_masked = batch["masked"].values, np.diff(np.asarray(batch["masked"].offsets))
    positions, labels = np.asarray(masked.field("position")).astype(np.int64), np.asarray(masked.field("piece"))
    sizes, boundary = np.diff(offsets), np.asarray(batch["boundary"]).astype(np.int64)
    is_whole = offsets[0] == 0 and offsets[-1] == len(pieces) and num_masked.sum() == len(positions)
    fault = _describe_first(
        {
            "is longer than its length": (sizes > length) | (sizes < 3),
            "has a boundary outside of it": (boundary < 3) | (boundary > sizes),
            "has pieces of no example beside it": np.full(len(boundary), not is_whole),
            "has no masked piece": (num_masked < 1) & (manifest.settings.masking != "whole-word"),
        }
    )
    if fault:
        return fault
    rows, faults = np.repeat(np.arange(len(boundary)), num_masked), {}
    misplaced = (positions < 1) | (positions >= sizes[rows] - 1) | (positions == boundary[rows] - 1)
    misplaced[1:] |= (np.diff(positions) <= 0) & (np.diff(rows) == 0)
    if special is not None:
        starts, lasts = offsets[:-1], offsets[1:] - 1
        ends_wrong = (pieces[starts + boundary - 1] != special.sep) | (pieces[lasts] != special.sep)
        faults["does not read [CLS] A [SEP] B [SEP]"] = ends_wrong | (pieces[starts] != special.cls)
        misplaced |= labels == special.sep
    faults["masks a position that it must not"] = np.isin(np.arange(len(boundary)), rows[misplaced])
    size, largest = manifest.vocabulary_size, max(pieces.max(initial=0), labels.max(initial=0))
    beyond = f"a piece has an id beyond the vocabulary of {size:,}" if largest >= size else None
    return _describe_first(faults) or beyond


def _describe_first(faults: dict[str, Array]) -> str | None:
    """Names the first example that has a fault; each fault comes with whether the examples have it."""
    return next((f"example {np.argmax(wrong)} {fault}" for fault, wrong in faults.items() if wrong.any()), None)
