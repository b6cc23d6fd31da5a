"""The global shuffle: a shard is all examples of the corpus in one range of random keys, sorted by these keys.

Sorted files of examples are merged first where there are many, so that a shard is made of a bounded number of them.
A shard takes some examples of every part, so the slices of all shards are as many as shards times parts. Merging up to
FAN_IN files into one, in as many rounds as it takes until MOST_FILES are left, reads and writes every example once a
round: the rounds grow with the logarithm of the parts, and everything else with the text.

A sorted file has the examples of a set of shards in ranges of keys that are as wide as each other, a record batch each:
one range in what a part becomes, more in what files are merged to, for which a range is as much as is sorted in memory
at once. Files to be merged hold all sets of a length, one after another. Files to make shards of hold one set each, so
that a set can be deleted as soon as its shards are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import Lists, make_example_batch, map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.running import NumberedTask
from data_prep.shards import ShardSet
from data_prep.work import Record, make_numbered_path

KEY = "key"  # the column of the keys
KEYS = 1 << 64  # how many keys there can be
MOST_FILES = 256  # most sorted files that a shard is made of
FAN_IN = 256  # most files that are merged into one
FILES_LEFT = 64  # files after a last round of merging: work for as many workers
RANGE_BYTES = 32 << 20  # size of the examples that are sorted in memory at once, about


def add_keys(schema: pa.Schema) -> pa.Schema:
    """Adds the keys to the columns of examples, which have them until they are in shards."""
    return schema.append(pa.field(KEY, pa.uint64(), nullable=False))


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

    def open(self, folder: Path, number: int, set_index: int) -> pa.RecordBatchFileReader:
        """Maps the file of this number that has a set."""
        return map_batches(folder / self.path(number, set_index))

    def find_batch(self, set_index: int, number: int) -> int:
        """Returns the number of the record batch that has a range of keys of a set of shards."""
        return number + (0 if self.apart else set_index * self.num_ranges)


@dataclass(frozen=True)
class MergeTask(NumberedTask):
    """Asks a worker to merge some files that follow each other into one; its weight is their bytes, about."""

    source: SortedFiles
    target: SortedFiles
    fan_in: int
    num_sets: int

    @property
    def numbers(self) -> range:
        """Numbers the files that are merged."""
        first = self.number * self.fan_in
        return range(first, min(first + self.fan_in, self.source.num_files))


def merging_rounds(
    parts: SortedFiles, total_bytes: int, num_sets: int
) -> Iterator[tuple[SortedFiles, int, SortedFiles]]:
    """Yields the rounds of merging that it takes: what is merged, how many files into one, and what comes of it."""
    source = parts
    while source.num_files > MOST_FILES:
        fan_in = min(FAN_IN, max(2, -(-source.num_files // FILES_LEFT)))
        num_files = -(-source.num_files // fan_in)
        largest = total_bytes / source.num_files * fan_in / num_sets  # bytes of a set in a merged file
        ranges = source.num_ranges * max(1, round(largest / source.num_ranges / RANGE_BYTES))
        target = SortedFiles(source.length, num_files, ranges, source.round + 1, apart=num_files <= MOST_FILES)
        yield source, fan_in, target
        source = target


def make_merge_tasks(
    folder: Path, source: SortedFiles, fan_in: int, target: SortedFiles, num_sets: int, total_bytes: int
) -> Iterator[MergeTask]:
    """Makes the tasks of a round of merging."""
    for number in range(target.num_files):
        yield MergeTask(folder, number, total_bytes // target.num_files, source, target, fan_in, num_sets)


def merge(task: MergeTask) -> Record:
    """Writes the examples of several sorted files into one for all sets, or one for each, a range of keys at a time."""
    target, sets = task.target, range(task.num_sets)
    schema = task.source.open(task.folder, task.numbers[0], 0).schema
    groups = [[number] for number in sets] if target.apart else [sets]
    files = [
        write_batches(task.folder, target.path(task.number, group[0]), schema, _merge_sets(task, group, schema))
        for group in groups
    ]
    return Record(files=files)


def _merge_sets(task: MergeTask, sets: Sequence[int], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Merges the examples of some sets."""
    source, total = task.source, task.target.num_ranges
    finer = total // source.num_ranges
    for one in sets:
        opened = [source.open(task.folder, number, one) for number in task.numbers]
        for number in range(source.num_ranges):
            bounds = [KEYS * at // total for at in range(number * finer, (number + 1) * finer + 1)]
            wider = (reader.get_batch(source.find_batch(one, number)) for reader in opened)
            for slices in zip(*(slice_by_keys(batch, bounds) for batch in wider), strict=True):
                yield gather(slices, schema)


def delete_merged(task: MergeTask) -> None:
    """Deletes the files that a task has merged."""
    for number in task.numbers:
        for path in task.source.paths(number, task.num_sets):
            (task.folder / path).unlink(missing_ok=True)


def slice_by_keys(batch: pa.RecordBatch, bounds: Sequence[int]) -> list[pa.RecordBatch]:
    """Divides a sorted batch at keys: a slice for what is from each of the bounds on and before the next one."""
    keys = np.asarray(batch[KEY])
    rows = [len(keys) if key == KEYS else int(np.searchsorted(keys, np.uint64(key))) for key in bounds]
    return [batch.slice(start, stop - start) for start, stop in pairwise(rows)]


@dataclass(frozen=True)
class ShardTask(NumberedTask):
    """Asks a worker for one shard; its weight is the pieces that it will have, about."""

    shards: ShardSet
    total: int
    """How many shards the set has."""
    set_index: int
    """The number of the set among those of its length."""
    files: SortedFiles

    @property
    def name(self) -> str:
        """Identifies the task within its step."""
        return self.shards.shard(self.number).replace("/", "-").removesuffix(".arrow")


def write_shard(task: ShardTask) -> Record:
    """Gathers the shard's examples from every sorted file and puts them into their final order."""
    files, one = task.files, task.set_index
    low, high = (KEYS * index // task.total for index in (task.number, task.number + 1))
    ranges = range(low * files.num_ranges // KEYS, -(-high * files.num_ranges // KEYS))
    opened = [files.open(task.folder, number, one) for number in range(files.num_files)]
    slices = [
        part
        for reader in opened
        for number in ranges
        for part in slice_by_keys(reader.get_batch(files.find_batch(one, number)), (low, high))
    ]
    keyed = opened[0].schema
    schema = keyed.remove(keyed.get_field_index(KEY))
    batch = gather(slices, keyed).select(schema.names)
    return Record(files=[write_batches(task.folder, task.shards.shard(task.number), schema, [batch])])


def gather(slices: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Puts the examples of sorted slices into one batch, sorted by their keys.

    That takes two sweeps over the slices: the first finds out where an example goes, the second copies it there. So
    the result is in memory once, and the slices, which are mapped from files, need not be.
    """
    sizes = np.concatenate([np.diff(examples["pieces"].offsets) for examples in slices])
    num_masked = np.concatenate([np.diff(examples["masked"].offsets) for examples in slices])
    others = [
        np.concatenate([np.asarray(examples[name].to_numpy(zero_copy_only=False)) for examples in slices])
        for name in schema.names[2:]
    ]
    order = np.argsort(others[-1], kind="stable")  # the keys are the last column
    piece_starts, piece_ends = _find_places(sizes, order)
    masked_starts, masked_ends = _find_places(num_masked, order)
    item = schema.field("masked").type.value_type
    pieces = np.empty(piece_ends[-1] if len(order) else 0, schema.field("pieces").type.value_type.to_pandas_dtype())
    labels = np.empty(masked_ends[-1] if len(order) else 0, pieces.dtype)
    positions = np.empty(len(labels), item.field("position").type.to_pandas_dtype())
    row = 0
    for examples in slices:
        end = row + examples.num_rows
        column, masked = examples["pieces"], examples["masked"]
        _scatter_lists(np.asarray(column.values), np.asarray(column.offsets), piece_starts[row:end], pieces)
        for name, target in (("piece", labels), ("position", positions)):
            values = np.asarray(masked.values.field(name))
            _scatter_lists(values, np.asarray(masked.offsets), masked_starts[row:end], target)
        row = end
    lists = Lists(pieces, piece_ends), positions, Lists(labels, masked_ends)
    return make_example_batch(schema, *lists, *(column[order] for column in others))


def _find_places(sizes: Array, order: Array) -> tuple[Array, Array]:
    """Finds where every example begins, in the order of the slices, and where it ends, in the order of the keys."""
    ends = np.cumsum(sizes[order])
    starts = np.empty_like(ends)
    starts[order] = ends - sizes[order]
    return starts, ends


@compiled
def _scatter_lists(values, offsets, starts, target):
    """Copies every list to its place in the target."""
    for row in range(starts.size):
        copy_items(target, starts[row], values, offsets[row], offsets[row + 1])
