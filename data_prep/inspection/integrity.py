"""Finds what is damaged in a folder of shards: every checksum, count and schema, and examples that are not well formed.

The checks yield faults, sentences that name the damaged file. They print what is sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console

from data_prep.arrow_files import map_batches, name_damage, read_batch
from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord
from data_prep.inspection.lookup import read_examples
from data_prep.origins import find_origins_of_folder
from data_prep.seals import require_seal
from data_prep.shards import DOCUMENTS, DOCUMENTS_SCHEMA, KEPT, MANIFEST, REPORT, KeptFile, Manifest, SetFigures
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.tokens import hash_documents, make_token_schema, read_corpus
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
    special = _special(folder, manifest)
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


def _special(folder: Path, manifest: Manifest) -> Special | None:
    """Looks up the ids of the pieces that stand for no text, where the vocabulary is whole."""
    try:
        return load_vocabulary(folder, manifest.vocabulary.cased).special
    except UserError:
        return None


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
    schema = make_token_schema(manifest.vocabulary_size)
    faults = [fault for record in manifest.kept for fault in _faults(_check_kept, folder, record, schema)]
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


def _check_kept(folder: Path, record: KeptFile, schema: pa.Schema) -> None:
    """Raises DamageError unless a file of documents has the columns and counts of its record, and its own digests."""
    record.check(folder)
    path = folder / record.path
    with name_damage(path, "cannot be read"):
        reader = map_batches(path)
        if reader.num_record_batches != 1 or reader.schema != schema:
            raise DamageError(f"{path}: its columns are not those of documents in pieces")
        batch = read_batch(reader, 0, path)
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
            totals.update(_checked_counts(path, record.rows, figures.length, manifest, special))

    faults = [fault for record in figures.shards for fault in _faults(check, record)]
    for name, count in totals.items() if not faults else ():
        if count != (promised := getattr(figures, name)):
            yield f"{folder / figures.set.folder}: {count:,} {name}, its manifest says {promised:,}"
    yield from faults
    number, counts = len(figures.shards), f"{totals['examples']:,} examples, {totals['pieces']:,} pieces"
    console.print(f"{figures.set.folder}: {number - len(faults)} of {number} shards right, {counts}")


def _checked_counts(path: Path, rows: int, length: int, manifest: Manifest, special: Special | None) -> dict[str, int]:
    """Counts what a shard has; raises DamageError unless it has the columns and examples that it must have."""
    batch = read_examples(path, manifest, length, rows)
    whole_word = manifest.settings.masking == "whole-word"
    fault = find_example_fault(batch, length, manifest.vocabulary_size, special, may_be_unmasked=whole_word)
    if fault:
        raise DamageError(f"{path}: {fault}")
    return {
        "examples": batch.num_rows,
        "pieces": len(batch["pieces"].values),
        "masked": len(batch["masked"].values),
        "random_next": batch["random_next"].true_count,
    }


class FlatExamples(NamedTuple):
    """The columns of examples as flat arrays, in which many examples are compared at once."""

    pieces: Array
    ends: Array
    """Where examples begin and end in the pieces."""
    boundary: Array
    """Where segment B begins in every example."""
    positions: Array
    """The masked positions of all examples."""
    labels: Array
    """The original pieces at those positions."""
    num_masked: Array
    """How many masked positions every example has."""

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> FlatExamples:
        """Reads the columns of a shard."""
        masked = batch["masked"].values
        return cls(
            np.asarray(batch["pieces"].values),
            np.asarray(batch["pieces"].offsets).astype(np.int64),
            np.asarray(batch["boundary"]).astype(np.int64),
            np.asarray(masked.field("position")).astype(np.int64),
            np.asarray(masked.field("piece")),
            np.diff(np.asarray(batch["masked"].offsets)),
        )


def find_example_fault(
    batch: pa.RecordBatch, length: int, vocabulary_size: int, special: Special | None, may_be_unmasked: bool
) -> str | None:
    """Describes the first example that is not well formed; None if all are.

    Where whole words are masked, an example of nothing but long words may have no mask.
    """
    flat = FlatExamples.from_batch(batch)
    sizes, boundary = np.diff(flat.ends), flat.boundary
    is_whole = flat.ends[0] == 0 and flat.ends[-1] == len(flat.pieces) and flat.num_masked.sum() == len(flat.positions)
    checks = [
        ("is longer than its length", (sizes > length) | (sizes < 3)),
        ("has a boundary outside of it", (boundary < 3) | (boundary > sizes)),
        ("has pieces of no example beside it", np.full(len(boundary), not is_whole)),
        ("has no masked piece", flat.num_masked < (0 if may_be_unmasked else 1)),
    ]
    for fault, wrong in checks:
        if wrong.any():
            return f"example {np.argmax(wrong)} {fault}"
    misplaced = None if special is None else _misplaced_special(flat, special)
    return misplaced or _mask_fault(flat, vocabulary_size)


def _misplaced_special(flat: FlatExamples, special: Special) -> str | None:
    """Finds an example whose segments do not stand between the special pieces as they must."""
    pieces, starts, ends = flat.pieces, flat.ends[:-1], flat.ends[1:]
    wrong = (pieces[starts] != special.cls) | (pieces[ends - 1] != special.sep)
    wrong |= pieces[starts + flat.boundary - 1] != special.sep
    if wrong.any():
        return f"example {np.argmax(wrong)} does not read [CLS] A [SEP] B [SEP]"
    masked = flat.labels == special.sep
    if not masked.any():
        return None
    row = np.searchsorted(np.cumsum(flat.num_masked), np.argmax(masked), side="right")
    return f"example {row} masks a position that it must not"


def _mask_fault(flat: FlatExamples, vocabulary_size: int) -> str | None:
    """Finds a mask at a special piece or out of order, and a piece that no vocabulary of this size has."""
    rows, positions = np.repeat(np.arange(len(flat.boundary)), flat.num_masked), flat.positions
    outside = (positions < 1) | (positions >= np.diff(flat.ends)[rows] - 1)
    outside |= positions == flat.boundary[rows] - 1
    ascending = (np.diff(positions) > 0) | (np.diff(rows) > 0)
    if outside.any() or not ascending.all():
        row = rows[np.argmax(outside)] if outside.any() else rows[1:][np.argmin(ascending)]
        return f"example {row} masks a position that it must not"
    if max(flat.pieces.max(initial=0), flat.labels.max(initial=0)) >= vocabulary_size:
        return f"a piece has an id beyond the vocabulary of {vocabulary_size:,}"
    return None
