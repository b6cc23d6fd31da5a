"""Near copies: documents that have almost the same shingles as an earlier one, found without comparing each with each.

signatures   every document gets some keys, of which two documents that are alike likely share one     signatures.py
candidates   documents that share a key are paired, each with the first few that have it               candidates.py
near-copies  the shingles of each pair are compared exactly, which decides what is a near copy         candidates.py

A document is a near copy where the Jaccard index with any earlier document, whether that one stays or not, is the
threshold at least. The hash functions are the same in every run: nothing is drawn, and what a document is depends on
it and those before it alone.

What grows: time and what is on the disk meanwhile, with the text; of memory, nothing but with the longest document. A
file of token documents is opened once for its keys, and once for each of 128 stretches at most to be compared; files of
keys are opened once for each range of half a million keys, those of candidates twice for each stretch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import map_batches
from data_prep.common.arrays import Array
from data_prep.common.files import replacing, write_csv
from data_prep.near_copies import candidates, signatures
from data_prep.near_copies.candidates import ComparedRecord
from data_prep.near_copies.signatures import PATH, Stretches, choose_banding, make_sign_tasks, read_stretches, sign
from data_prep.running import Runner, Step
from data_prep.shards import NEAR_REPORT, WORK
from data_prep.vocabulary.tokens import list_token_files
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import Record, Records, TokensRecord

NEAR_COPIES = f"{WORK}/near-copies.u8"  # a byte for each document: whether it is a near copy of an earlier one
COLUMNS = ("jaccard", "source", "id", "title", "earlier source", "earlier id", "earlier title")
EXAMPLES = 20  # near copies in the report
GROUPS = f"{WORK}/near-groups.u64"  # the digests by which documents are held out for validation
LOOSE = 0.5
"""Jaccard index from which documents that stay are on the same side of validation."""
FOUND, GROUPED = "near-found", "near-grouped"
"""Names under which it is recorded that near copies are marked and the report is written, and that GROUPS is."""

SIGN = Step(signatures.STEP, sign, Record, "pieces")
FIND = Step(candidates.FIND_STEP, candidates.find_candidates, Record, "keys")
COMPARE = Step(candidates.COMPARE_STEP, candidates.compare, ComparedRecord, "documents")
Tokens: TypeAlias = Iterable[TokensRecord]
NEAR_STEPS = (SIGN.name, FIND.name, COMPARE.name)


def mark_near_copies(runner: Runner, tokens: Tokens, vocabulary: Vocabulary, threshold: float | None) -> None:
    """Marks in NEAR_COPIES every document that is a near copy of an earlier one, and writes the report.

    Nothing is done where no threshold is given.
    """
    if threshold is None:
        return
    work = runner.work
    if not work.is_finished(FOUND):
        parts, near = _search(runner, tokens, vocabulary, threshold)
        _write_marks(work.out, parts, near)
        _write_report(work.out, parts, near)
        work.finish(FOUND)
    work.forget(*NEAR_STEPS)


def group_near_copies(runner: Runner, tokens: Tokens, vocabulary: Vocabulary, digests: Iterable[Array]) -> None:
    """Writes into GROUPS the digest of every document, or that of an earlier one that has LOOSE in common with it."""
    work = runner.work
    if not work.is_finished(GROUPED):
        work.undo(*NEAR_STEPS)  # what they found before is in NEAR_COPIES
        with replacing(work.out / GROUPS) as file:
            file.writelines(part.tobytes() for part in digests)
        groups = np.memmap(work.out / GROUPS, np.uint64, "r+")
        for record in _search(runner, tokens, vocabulary, LOOSE)[1]:
            batch = map_batches(work.out / record.path).get_batch(0)
            for later, earlier in zip(*(batch[name].to_pylist() for name in ("later", "earlier")), strict=True):
                groups[later] = groups[earlier]
        groups.flush()
        work.finish(GROUPED)
    work.forget(*NEAR_STEPS)


def _search(
    runner: Runner, tokens: Tokens, vocabulary: Vocabulary, threshold: float
) -> tuple[Stretches, Records[ComparedRecord]]:
    """Finds near copies by the three steps."""
    folder = runner.work.out
    list_token_files(folder, PATH, tokens)
    parts, banding = read_stretches(folder), choose_banding(threshold)
    runner.run(SIGN, partial(make_sign_tasks, folder, parts, banding, vocabulary.sha256))
    found = runner.run(FIND, partial(candidates.make_find_tasks, folder, banding.bands * parts.num_documents))
    options = len(found.places), threshold, vocabulary.sha256
    return parts, runner.run(COMPARE, partial(candidates.make_compare_tasks, folder, parts, *options))


def _write_marks(folder: Path, parts: Stretches, near: Iterable[ComparedRecord]) -> None:
    """Writes a byte for each document, a stretch at a time."""
    with replacing(folder / NEAR_COPIES) as file:
        for number, record in enumerate(near):
            first, end = parts.find_documents(number)
            marks = np.zeros(end - first, np.uint8)
            marks[np.asarray(map_batches(folder / record.path).get_batch(0)["later"]) - first] = 1
            file.write(marks.tobytes())


def _write_report(folder: Path, parts: Stretches, near: Iterable[ComparedRecord]) -> None:
    """Writes a table of EXAMPLES near copies, evenly spaced, with the earlier documents that they are like."""
    total = sum(record.files[0].rows for record in near)
    places = np.unique(np.arange(EXAMPLES) * total // EXAMPLES) if total else np.empty(0, np.int64)
    rows, before = [], 0
    for record in near:
        batch = map_batches(folder / record.path).get_batch(0)
        own = places[(before <= places) & (places < before + batch.num_rows)] - before
        for row in batch.take(pa.array(own)).to_pylist():
            names = (_look_up_names(folder, parts, row[name]) for name in ("later", "earlier"))
            rows.append((f"{row['jaccard']:.4f}", *itertools.chain.from_iterable(names)))
        before += batch.num_rows
    write_csv(folder, NEAR_REPORT, COLUMNS, rows)


def _look_up_names(folder: Path, parts: Stretches, document: int) -> tuple[str, str, str]:
    """Looks up the source, the id and the title of a document."""
    part = int(parts.find(np.array(document)))
    batch = map_batches(folder / parts.path(part)).get_batch(0)
    row = document - int(parts.firsts[part])
    return str(parts.sources[part]), str(batch["id"][row]), str(batch["title"][row])
