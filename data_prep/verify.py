#!/usr/bin/env python3
"""Checks a folder of shards: every checksum, count and schema, and that every example is well formed.

    python data_prep/verify.py data/wiki

Exits with 0 if all is right, with 1 naming each damaged file, with 2 if there is nothing to check, and with 3 if what
is there is right but the folder is not finished.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import tyro
from rich.console import Console

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, read_json
from data_prep.shards import (
    DOCUMENTS,
    DOCUMENTS_SCHEMA,
    MANIFEST,
    WORK,
    Manifest,
    ShardSet,
    example_schema,
    fingerprint,
    map_batches,
    read_shard,
)
from data_prep.vocabulary.vocabulary import VOCABULARY, Special, load_vocabulary

FINE, DAMAGED, UNUSABLE, UNFINISHED = 0, 1, 2, 3


@dataclass(frozen=True)
class Verify:
    """Checks a folder of shards."""

    data: Annotated[Path, tyro.conf.Positional]
    """The folder that shard.py wrote."""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    console, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    folder = tyro.cli(Verify, args=arguments, prog="verify.py").data
    try:
        if not (folder / MANIFEST).exists() and (folder / WORK / "plan.json").exists():
            faults = list(unfinished_faults(folder, console))
            state = UNFINISHED
        else:
            manifest = Manifest.read(folder)
            faults = list(folder_faults(folder, manifest, console))
            state = FINE
    except UserError as error:
        errors.print(f"error: {error}", markup=False)
        return DAMAGED if isinstance(error, DamageError) else UNUSABLE
    for fault in faults:
        errors.print(f"damaged: {fault}", markup=False)
    if faults:
        errors.print(
            "remove the folder and make it anew with shard.py"
            if state == FINE
            else "remove the folder and start anew: shard.py would go on from what is damaged"
        )
        return DAMAGED
    console.print("all is right" if state == FINE else "what is there is right; run shard.py again to finish it")
    return state


def folder_faults(folder: Path, manifest: Manifest, console: Console) -> Iterator[str]:
    """All that is wrong with a finished folder."""
    if manifest.fingerprint != fingerprint(manifest.content):
        yield f"{folder / MANIFEST}: its fingerprint does not fit what it says: it was edited"
    for record in manifest.tables():
        yield from _faults(record.check, folder)
    yield from _faults(_check_documents, folder, manifest)
    special = _special(folder, manifest)
    for shards, records in manifest.sets().items():
        totals: Counter[str] = Counter()
        faults = [
            each for record in records for each in _faults(_check, folder, record, manifest, shards, special, totals)
        ]
        yield from faults or _wrong_totals(folder, manifest, shards, totals)
        figures = f"{totals['examples']:,} examples, {totals['pieces']:,} pieces"
        console.print(f"{shards.folder}: {len(records) - len(faults)} of {len(records)} shards right, {figures}")
    known = {MANIFEST, *(record.path for record in manifest.files())}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and str(path.relative_to(folder)) not in known:
            console.print(f"note: {path} is not in the manifest; it is not used")


def _wrong_totals(folder: Path, manifest: Manifest, shards: ShardSet, totals: Counter[str]) -> Iterator[str]:
    promised = next(each for each in manifest.content["sets"] if ShardSet.of(each) == shards)
    for name, count in totals.items():
        if count != promised[name]:
            yield f"{folder / shards.folder}: {count:,} {name}, its manifest says {promised[name]:,}"


def _faults(check: Callable[..., None], *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except DamageError as error:
        yield str(error)


def _special(folder: Path, manifest: Manifest) -> Special | None:
    """The special pieces, if the vocabulary is whole."""
    try:
        return load_vocabulary(folder / VOCABULARY, manifest.content["vocabulary"]["cased"]).special
    except UserError:
        return None


def _check_documents(folder: Path, manifest: Manifest) -> None:
    path = folder / DOCUMENTS
    reader = map_batches(path)
    try:
        rows = sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
    except (pa.ArrowInvalid, OSError) as error:
        raise DamageError(f"{path}: cannot be read: {error}") from error
    promised = manifest.content["corpus"]["documents"]
    if reader.schema != DOCUMENTS_SCHEMA or rows != promised:
        raise DamageError(f"{path}: {rows:,} documents of {reader.schema.names}; its manifest says {promised:,}")


def _check(
    folder: Path,
    record: FileRecord,
    manifest: Manifest,
    shards: ShardSet,
    special: Special | None,
    totals: Counter[str],
) -> None:
    """One shard: its bytes, its schema, its rows; adds its counts to the totals."""
    record.check(folder)
    path = folder / record.path
    batch = read_shard(path)
    schema = example_schema(shards.length, manifest.vocabulary_size, manifest.content["corpus"]["documents"])
    if batch.schema != schema:
        raise DamageError(f"{path}: its columns are not those of an example of length {shards.length}:\n{batch.schema}")
    if batch.num_rows != record.rows:
        raise DamageError(f"{path}: {batch.num_rows:,} examples, its record says {record.rows:,}")
    whole_word = manifest.content["settings"]["masking"] == "whole-word"
    fault = example_fault(batch, shards.length, manifest.vocabulary_size, special, may_be_unmasked=whole_word)
    if fault:
        raise DamageError(f"{path}: {fault}")
    totals.update(
        examples=batch.num_rows,
        pieces=len(batch["pieces"].values),
        masked=len(batch["masked"].values),
        random_next=batch["random_next"].true_count,
    )


def example_fault(
    batch: pa.RecordBatch, length: int, vocabulary_size: int, special: Special | None, may_be_unmasked: bool
) -> str | None:
    """What is wrong with the first example that is not well formed.

    Where whole words are masked, an example of nothing but long words may have no mask.
    """
    pieces, ends = np.asarray(batch["pieces"].values), np.asarray(batch["pieces"].offsets).astype(np.int64)
    masked_ends = np.asarray(batch["masked"].offsets)
    positions = np.asarray(batch["masked"].values.field("position")).astype(np.int64)
    labels = np.asarray(batch["masked"].values.field("piece"))
    sizes, boundary = np.diff(ends), np.asarray(batch["boundary"]).astype(np.int64)
    rows = np.repeat(np.arange(len(sizes)), np.diff(masked_ends))
    ascending = (np.diff(positions) > 0) | (np.diff(rows) > 0)
    checks = [
        ("is longer than its length", (sizes > length) | (sizes < 3)),
        ("has a boundary outside of it", (boundary < 3) | (boundary > sizes)),
        ("has no masked piece", np.diff(masked_ends) < (0 if may_be_unmasked else 1)),
    ]
    for what, wrong in checks:
        if wrong.any():
            return f"example {np.argmax(wrong)} {what}"
    if special is not None:
        sep = pieces[ends[:-1] + boundary - 1] != special.sep
        wrong = (pieces[ends[:-1]] != special.cls) | (pieces[ends[1:] - 1] != special.sep) | sep
        if wrong.any():
            return f"example {np.argmax(wrong)} does not read [CLS] A [SEP] B [SEP]"
    outside = (positions < 1) | (positions >= sizes[rows] - 1) | (positions == boundary[rows] - 1)
    if outside.any() or not ascending.all():
        row = rows[np.argmax(outside)] if outside.any() else rows[1:][np.argmin(ascending)]
        return f"example {row} masks a position that it must not"
    if len(pieces) and max(pieces.max(), labels.max()) >= vocabulary_size:
        return f"a piece has an id beyond the vocabulary of {vocabulary_size:,}"
    return None


def unfinished_faults(folder: Path, console: Console) -> Iterator[str]:
    """All that is wrong with what a run that did not finish has left."""
    from data_prep.pipeline import STEPS  # not needed for finished folders

    work = folder / WORK
    console.print(f"{folder} is not finished")
    spent = {"documents", "words"} if (work / "tokens.json").exists() else set()
    for step in STEPS:
        summary = work / f"{step}.json"
        try:
            paths = [] if summary.exists() else sorted((work / "records" / step).glob("*.json"))
            records = read_json(summary)["records"] if summary.exists() else [read_json(path) for path in paths]
        except DamageError as error:
            yield str(error)
            continue
        if records or summary.exists():
            console.print(f"{step}: {'finished' if summary.exists() else 'begun'}, {len(records)} tasks done")
        if step not in spent:
            for file in (file for record in records for file in record["files"]):
                known = {key: file[key] for key in ("path", "size", "rows", "sha256")}
                yield from _faults(FileRecord(**known).check, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
