"""Near copies, second and third step: documents that share a key are candidates, which are then compared exactly.

The keys of the corpus are divided into ranges, as many as it takes for a range to fit into memory, and a task finds the
candidates of a range. Of the documents that share a key, each is a candidate with the first FEW of them only: so that a
million documents with the same text are a few million candidates, not the square.

Time and disk grow with the keys: FEW pairs of 16 bytes at most for each. A worker holds some KEYS at a time, also where
one key is that of half the corpus. It opens every file of keys once, of which there are as many as stretches.

Then a task compares the later documents of a stretch with the earlier ones that they may be near copies of, by the
shingles in the pieces of both. These may be anywhere before them: an earlier file after another, so that a document is
compared in the order of the corpus with those before it, until it is found to be the near copy of one.

Time grows with the candidates and the words in them. A worker maps the files of its stretch and one more, and holds the
shingles of two documents and some PAIRS, for which it opens an earlier file once. So a file is opened once for each
stretch at most, or for so many candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import make_schema, map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.near_copies import signatures
from data_prep.near_copies.signatures import Stretches, Texts, compare_pairs, load_continues, read_stretches, read_texts
from data_prep.running import NumberedTask
from data_prep.work import Record, make_numbered_path

FIND_STEP, COMPARE_STEP = "candidates", "near-copies"
PAIR_SCHEMA = make_schema(later=pa.int64(), earlier=pa.int64())
NEAR_SCHEMA = make_schema(later=pa.int64(), earlier=pa.int64(), jaccard=pa.float64())
KEYS = 1 << 19  # in a range, about
FEW = 4  # documents with a key that all later ones with it are compared with
PAIRS = 1 << 21  # candidates in memory at once, about


@dataclass(frozen=True)
class FindTask(NumberedTask):
    """Asks a worker for the pairs of documents that share a key of a range."""

    num_ranges: int
    """The number of ranges that the keys are divided into."""


def make_find_tasks(folder: Path, num_keys: int) -> Iterator[FindTask]:
    """Makes a task of every range of keys."""
    num_ranges = max(1, round(num_keys / KEYS))
    for number in range(num_ranges):
        yield FindTask(folder, number, num_keys // num_ranges, num_ranges)


def find_candidates(task: FindTask) -> Record:
    """Writes the pairs of a range, sorted by the later document and then by the earlier one."""
    file = write_batches(task.folder, make_numbered_path(FIND_STEP, task.number), PAIR_SCHEMA, _find_pairs(task))
    return Record(files=[file])


def _find_pairs(task: FindTask) -> Iterator[pa.RecordBatch]:
    """Pairs the documents of a range, some KEYS at a time with the first of each key that came before."""
    before = np.empty(0, np.uint64), np.empty(0, np.int64)
    for keys, documents in _read_range(task):
        keys, documents = np.concatenate([before[0], keys]), np.concatenate([before[1], documents])
        order = np.argsort(keys, kind="stable")  # which leaves the documents of a key in their order
        keys, documents = keys[order], documents[order]
        places = number_equals(keys)
        pairs = sort_pairs(*pair_up(documents, places, documents > before[1].max(initial=-1)))
        yield pa.record_batch([pa.array(column) for column in pairs], schema=PAIR_SCHEMA)
        before = keys[places < FEW], documents[places < FEW]


def _read_range(task: FindTask) -> Iterator[tuple[Array, Array]]:
    """Reads the keys of a range and the numbers of their documents, about KEYS at a time, as the corpus has them."""
    parts = read_stretches(task.folder)
    bounds = [(number << 64) // task.num_ranges for number in (task.number, task.number + 1)]
    keys, documents = list[Array](), list[Array]()
    for stretch in range(parts.num_stretches):
        reader = map_batches(task.folder / make_numbered_path(signatures.STEP, stretch))
        for index, part in enumerate(parts.stretch(stretch)):
            batch = reader.get_batch(index)
            here = np.asarray(batch["key"])
            low, high = (here.searchsorted(np.uint64(key)) if key >> 64 == 0 else len(here) for key in bounds)
            keys.append(here[low:high].copy())
            documents.append(np.asarray(batch["row"])[low:high].astype(np.int64) + parts.firsts[part])
            if sum(map(len, keys)) >= KEYS:
                yield np.concatenate(keys), np.concatenate(documents)
                keys, documents = [], []
    if keys:
        yield np.concatenate(keys), np.concatenate(documents)


def number_equals(keys: Array) -> Array:
    """Numbers equal keys from 0; the keys are sorted."""
    begins = np.ones(len(keys), bool)
    begins[1:] = keys[1:] != keys[:-1]
    firsts = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return np.asarray(np.arange(len(keys)) - firsts)


def pair_up(documents: Array, places: Array, fresh: Array) -> tuple[Array, Array]:
    """Pairs every fresh document with the first FEW of those that have the same key and are before it.

    `documents` are sorted by key and then by number; `places` number those with the same key. Returns the later and
    the earlier documents.
    """
    rows = [np.flatnonzero(fresh & (places > nth)) for nth in range(FEW)]
    earlier = [documents[row - places[row] + nth] for nth, row in enumerate(rows)]
    return documents[np.concatenate(rows)], np.concatenate(earlier)


def sort_pairs(later: Array, earlier: Array) -> tuple[Array, Array]:
    """Sorts pairs, by the later document first, and leaves each of them once."""
    order = np.lexsort((earlier, later))
    later, earlier = later[order], earlier[order]
    fresh = np.ones(len(later), bool)
    fresh[1:] = (later[1:] != later[:-1]) | (earlier[1:] != earlier[:-1])
    return later[fresh], earlier[fresh]


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
    for (earlier, there), (later, here), pairs in _open_pairs(task, parts):
        own = slice(parts.firsts[later] - first, parts.firsts[later + 1] - first)
        rows = pairs[0] - parts.firsts[later], pairs[1] - parts.firsts[earlier]
        results = originals[own], indices[own], parts.firsts[earlier]
        compared += compare_pairs(here, there, *rows, continues, task.threshold, *results)
    near = np.flatnonzero(originals >= 0)
    batch = pa.record_batch([near + first, originals[near], indices[near]], schema=NEAR_SCHEMA)
    file = write_batches(task.folder, make_numbered_path(COMPARE_STEP, task.number), NEAR_SCHEMA, [batch])
    return ComparedRecord(files=[file], compared=compared)


Opened = tuple[int, Texts]
"""The number of a file of token documents, and its documents, which are mapped into memory."""


def _open_pairs(task: CompareTask, parts: Stretches) -> Iterator[tuple[Opened, Opened, tuple[Array, Array]]]:
    """Yields the pairs of a stretch by their files: the earlier file, the later one, and the pairs to compare.

    The earlier files ascend.
    """
    for few in _divide_stretch(task, parts):
        own = {part: read_texts(task.folder / parts.path(part)) for part in few}
        later, earlier = _read_pairs(task, parts.firsts[few.start], parts.firsts[few.stop])
        homes = parts.find(earlier), parts.find(later)
        order = np.lexsort((homes[1], homes[0]))  # which leaves pairs of the same files as they are
        later, earlier, earlier_part, later_part = (column[order] for column in (later, earlier, *homes))
        for part, whole in _find_runs(earlier_part):
            there = own.get(part) or read_texts(task.folder / parts.path(part))
            for own_part, some in _find_runs(later_part[whole]):
                yield (part, there), (own_part, own[own_part]), (later[whole][some], earlier[whole][some])


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
        reader = map_batches(task.folder / make_numbered_path(FIND_STEP, number))
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
