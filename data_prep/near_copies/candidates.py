"""Near copies, second step: documents that share a key are candidates, to be compared with the first that have it.

The keys of the corpus are divided into ranges, as many as it takes for a range to fit into memory, and a task finds the
candidates of a range. Of the documents that share a key, each is a candidate with the first FEW of them only: so that a
million documents with the same text are a few million candidates, not the square.

Time and disk grow with the keys: FEW pairs of 16 bytes at most for each. A worker holds some KEYS at a time, also where
one key is that of half the corpus. It opens every file of keys once, of which there are as many as stretches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import make_schema, map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.near_copies import signatures
from data_prep.near_copies.signatures import read_stretches
from data_prep.running import NumberedTask
from data_prep.work import Record, make_numbered_path

STEP = "candidates"
SCHEMA = make_schema(later=pa.int64(), earlier=pa.int64())
KEYS = 1 << 19  # in a range, about
FEW = 4  # documents with a key that all later ones with it are compared with


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
    file = write_batches(task.folder, make_numbered_path(STEP, task.number), SCHEMA, _find_pairs(task))
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
        yield pa.record_batch([pa.array(column) for column in pairs], schema=SCHEMA)
        before = keys[places < FEW], documents[places < FEW]


def _read_range(task: FindTask) -> Iterator[tuple[Array, Array]]:
    """Reads the keys of a range and the numbers of their documents, about KEYS at a time, as the corpus has them."""
    parts = read_stretches(task.folder)
    bounds = [(number << 64) // task.num_ranges for number in (task.number, task.number + 1)]
    waiting: list[tuple[Array, Array]] = []
    for stretch in range(parts.num_stretches):
        reader = map_batches(task.folder / make_numbered_path(signatures.STEP, stretch))
        for index, part in enumerate(parts.stretch(stretch)):
            batch = reader.get_batch(index)
            keys = np.asarray(batch["key"])
            low, high = (keys.searchsorted(np.uint64(key)) if key >> 64 == 0 else len(keys) for key in bounds)
            rows = np.asarray(batch["row"])[low:high].astype(np.int64)
            waiting.append((keys[low:high].copy(), rows + parts.firsts[part]))
            if sum(len(rows) for _, rows in waiting) >= KEYS:
                yield _join(waiting)
                waiting = []
    if waiting:
        yield _join(waiting)


def _join(columns: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    keys, documents = zip(*columns, strict=True)
    return np.concatenate(keys), np.concatenate(documents)


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
