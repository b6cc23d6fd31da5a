"""The files of token documents that are searched for near copies, and the stretches that they are divided into.

A stretch is some files that follow each other: one where there are few, more where there are more than MOST_STRETCHES.
So a corpus has a bounded number of stretches, however large it is, and a file that is opened once for each of them is
opened a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import make_schema, map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.shards import WORK
from data_prep.work import TokensRecord

PATH = f"{WORK}/near-parts.arrow"
SCHEMA = make_schema(path=pa.string(), source=pa.string(), documents=pa.int64(), pieces=pa.int64())
MOST_STRETCHES = 128


@dataclass(frozen=True)
class NumberedTask:
    """Asks a worker for one stretch, or one range of keys, of a step of the search."""

    folder: Path
    """The output folder."""
    number: int
    """The number of the stretch or range."""
    weight: int
    """How much work it is: pieces, keys or documents, by the step."""

    @property
    def name(self) -> str:
        """The number as text, in which the tasks of a step differ."""
        return f"{self.number:07}"


@dataclass(frozen=True)
class Parts:
    """All files of token documents that have any, in the order of the corpus."""

    paths: pa.StringArray
    sources: pa.StringArray
    """The names of the sources that their texts are from."""
    firsts: Array
    """The numbers of the documents with which the files begin; at the end, how many documents there are."""
    pieces: Array
    """The number of pieces of every file."""

    @cached_property
    def bounds(self) -> list[int]:
        """Lists the files with which the stretches begin; at the end, how many files there are."""
        count = len(self.paths)
        size = max(1, -(-count // MOST_STRETCHES))
        return [*range(0, count, size), count]

    @property
    def num_documents(self) -> int:
        """Counts all documents."""
        return int(self.firsts[-1])

    @property
    def num_stretches(self) -> int:
        """Counts the stretches."""
        return len(self.bounds) - 1

    def stretch(self, number: int) -> range:
        """Returns the numbers of the files of a stretch."""
        return range(self.bounds[number], self.bounds[number + 1])

    def find_documents(self, number: int) -> tuple[int, int]:
        """Returns the numbers of the first document of a stretch and of the first one after it."""
        files = self.stretch(number)
        return int(self.firsts[files.start]), int(self.firsts[files.stop])

    def count_pieces(self, number: int) -> int:
        """Counts the pieces of a stretch."""
        files = self.stretch(number)
        return int(self.pieces[files.start : files.stop].sum())

    def find(self, documents: Array) -> Array:
        """Finds the files that documents are in."""
        return np.searchsorted(self.firsts, documents, side="right") - 1

    def path(self, number: int) -> str:
        """Returns the path of a file, relative to the output folder."""
        return str(self.paths[number].as_py())


def write_parts(folder: Path, tokens: Iterable[TokensRecord]) -> None:
    """Writes the paths, sources and sizes of the files of token documents, for all tasks."""
    filled = [(one.path, one.source, one.documents, one.pieces) for one in tokens if one.documents]
    columns = [pa.array(values, field.type) for values, field in zip(zip(*filled, strict=True), SCHEMA, strict=True)]
    write_batches(folder, PATH, SCHEMA, [pa.record_batch(columns, schema=SCHEMA)])


def read_parts(folder: Path) -> Parts:
    """Reads what write_parts has written."""
    batch = map_batches(folder / PATH).get_batch(0)
    firsts = np.concatenate([[0], np.cumsum(np.asarray(batch["documents"]))]).astype(np.int64)
    return Parts(batch["path"], batch["source"], firsts, np.asarray(batch["pieces"]))
