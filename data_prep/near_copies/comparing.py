"""Near copies, third step: the shingles of candidates are compared, exactly, in the pieces of both documents.

A task compares the later documents of a stretch with the earlier ones that they may be near copies of, which may be
anywhere before them: an earlier file after another, so that a document is compared in the order of the corpus with
those before it, until it is found to be the near copy of one.

Time grows with the candidates and the words in them. A worker maps the files of its stretch and one more, and holds the
shingles of two documents and some PAIRS, for which it opens an earlier file once. So a file is opened once for each
stretch at most, or for so many candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import make_schema, map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.near_copies import candidates
from data_prep.near_copies.candidates import sort_pairs
from data_prep.near_copies.shingles import Texts, compare_pairs, load_continues, read_texts
from data_prep.near_copies.signatures import Stretches, read_stretches
from data_prep.running import NumberedTask
from data_prep.work import Record, make_numbered_path

STEP = "near-copies"
PAIRS = 1 << 21  # candidates in memory at once, about
SCHEMA = make_schema(later=pa.int64(), earlier=pa.int64(), jaccard=pa.float64())


class ComparedRecord(Record):
    """Record of a task that compares documents."""

    compared: int
    """The number of pairs that it has compared."""


@dataclass(frozen=True)
class CompareTask(NumberedTask):
    """Asks a worker which documents of a stretch are near copies of earlier ones."""

    num_ranges: int
    """The number of files of candidates."""
    threshold: float
    vocabulary_sha256: str


def make_compare_tasks(
    folder: Path, parts: Stretches, num_ranges: int, threshold: float, vocabulary_sha256: str
) -> Iterator[CompareTask]:
    """Makes a task of every stretch."""
    for number in range(parts.num_stretches):
        first, end = parts.find_documents(number)
        yield CompareTask(folder, number, end - first, num_ranges, threshold, vocabulary_sha256)


def compare(task: CompareTask) -> ComparedRecord:
    """Writes which documents of a stretch are near copies, of which earlier one each, and how alike the two are."""
    parts, continues = read_stretches(task.folder), load_continues(task.folder, task.vocabulary_sha256)
    first, end = parts.find_documents(task.number)
    originals, indices, compared = np.full(end - first, -1, np.int64), np.zeros(end - first), 0
    for earlier, later, pairs in _open_pairs(task, parts):
        begin, stop = parts.firsts[later.part : later.part + 2] - first
        compared += compare_pairs(
            later.texts,
            earlier.texts,
            pairs[0] - parts.firsts[later.part],
            pairs[1] - parts.firsts[earlier.part],
            continues,
            task.threshold,
            originals[begin:stop],
            indices[begin:stop],
            parts.firsts[earlier.part],
        )
    near = np.flatnonzero(originals >= 0)
    batch = pa.record_batch([near + first, originals[near], indices[near]], schema=SCHEMA)
    file = write_batches(task.folder, make_numbered_path(STEP, task.number), SCHEMA, [batch])
    return ComparedRecord(files=[file], compared=compared)


class Opened(NamedTuple):
    """A file of token documents that is mapped into memory."""

    part: int
    texts: Texts


def _open_pairs(task: CompareTask, parts: Stretches) -> Iterator[tuple[Opened, Opened, tuple[Array, Array]]]:
    """Yields the pairs of a stretch by their files: the earlier file, the later one, and the pairs to compare.

    The earlier files ascend.
    """

    def opened(part: int) -> Opened:
        return Opened(part, read_texts(task.folder / parts.path(part)))

    for few in _divide_stretch(task, parts):
        own = {part: opened(part) for part in few}
        later, earlier = _read_pairs(task, parts.firsts[few.start], parts.firsts[few.stop])
        homes = parts.find(earlier), parts.find(later)
        order = np.lexsort((homes[1], homes[0]))  # which leaves pairs of the same files as they are
        later, earlier, earlier_part, later_part = (column[order] for column in (later, earlier, *homes))
        for part, whole in _find_runs(earlier_part):
            there = own.get(part) or opened(part)
            for own_part, some in _find_runs(later_part[whole]):
                yield there, own[own_part], (later[whole][some], earlier[whole][some])


def _divide_stretch(task: CompareTask, parts: Stretches) -> Iterator[range]:
    """Divides a stretch into ranges of files, each of one file or of at most PAIRS candidates."""
    files = parts.stretch(task.number)
    bounds = parts.firsts[files.start : files.stop + 1]
    counts = sum(np.diff(batch.searchsorted(bounds)) for batch, _ in _read_candidates(task))
    begin, total = files.start, 0
    for part, count in zip(files, np.broadcast_to(counts, len(files)).tolist(), strict=True):
        if total + count > PAIRS and part > begin:
            yield range(begin, part)
            begin, total = part, 0
        total += count
    yield range(begin, files.stop)


def _read_candidates(task: CompareTask) -> Iterator[tuple[Array, Array]]:
    """Maps all candidates into memory, some at a time: the later documents, which are sorted, and the earlier ones."""
    for number in range(task.num_ranges):
        reader = map_batches(task.folder / make_numbered_path(candidates.STEP, number))
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            yield np.asarray(batch["later"]), np.asarray(batch["earlier"])


def _read_pairs(task: CompareTask, first: int, end: int) -> tuple[Array, Array]:
    """Reads the candidates whose later document is from `first` on and before `end`, each pair once."""
    found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for later, earlier in _read_candidates(task):
        low, high = later.searchsorted([first, end])
        found.append((later[low:high].copy(), earlier[low:high].copy()))
    return sort_pairs(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _find_runs(values: Array) -> Iterator[tuple[int, slice]]:
    """Yields the distinct values of a sorted array, each with the slice where it stands."""
    bounds = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)] if len(values) else [0]
    for begin, end in itertools.pairwise(bounds):
        yield int(values[begin]), slice(begin, end)
