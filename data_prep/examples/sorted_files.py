"""Sorted files of examples, between those of the parts and the shards.

A sorted file has the examples of a set of shards in ranges of keys that are as wide as each other, a record batch each:
one range in what a part becomes, more in what files are merged to, for which a range is as much as is sorted in memory
at once. Files to be merged hold all sets of a length, one after another. Files to make shards of hold one set each, so
that a set can be deleted as soon as its shards are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from data_prep.arrow_files import map_batches
from data_prep.work import make_numbered_path

MOST_FILES = 256  # most sorted files that a shard is made of


@dataclass(frozen=True)
class SortedSet:
    """The examples of one set of shards in a sorted file."""

    reader: pa.RecordBatchFileReader
    first: int
    """The number of the record batch with its first range of keys."""

    def range(self, number: int) -> pa.RecordBatch:
        """Gives the examples of a range of keys."""
        return self.reader.get_batch(self.first + number)

    @property
    def schema(self) -> pa.Schema:
        """Gives the columns of the examples."""
        return self.reader.schema


@dataclass(frozen=True)
class SortedFiles:
    """Sorted files of the examples of one length: those of the parts, or what they were merged to."""

    length: int
    num_files: int
    num_ranges: int = 1
    """How many ranges of keys every set has in a file."""
    round: int = 0
    """In which round they were merged; 0 for those of the parts."""
    apart: bool = False
    """Whether each set has files of its own."""

    @property
    def step(self) -> str:
        """Names the step that makes the files, and their folder."""
        return f"merged-{self.length}-{self.round}" if self.round else f"examples-{self.length}"

    def folder_of(self, set_index: int) -> str:
        """Names the folder of a set that has files of its own, in the work folder."""
        return f"{self.step}/set-{set_index}"

    def path(self, number: int, set_index: int) -> str:
        """Names the file with a set, relative to the output folder."""
        return make_numbered_path(self.folder_of(set_index) if self.apart else self.step, number)

    def paths(self, number: int, num_sets: int) -> list[str]:
        """Names all files of a number, that of the first set first."""
        return [self.path(number, set_index) for set_index in range(num_sets if self.apart else 1)]

    def open(self, folder: Path, number: int, set_index: int) -> SortedSet:
        """Opens a file at the examples of a set."""
        reader = map_batches(folder / self.path(number, set_index))
        return SortedSet(reader, 0 if self.apart else set_index * self.num_ranges)
