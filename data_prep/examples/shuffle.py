"""Step 5, shards: gathers all examples of the corpus in one range of keys, and sorts them by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.examples.assembly import KEY
from data_prep.shards import Lists, ShardSet, example_batch, map_batches, write_batches

KEYS = 1 << 64  # how many keys there can be


@dataclass(frozen=True)
class ShardTask:
    """Asks a worker for one shard."""

    folder: Path
    """The output folder."""
    shards: ShardSet
    index: int
    total: int
    """How many shards the set has."""
    batch: int
    """Which record batch of a file of examples is of this set."""
    paths: tuple[str, ...]
    """The files of examples of this length, relative to the output folder."""
    weight: int
    """How many pieces the shard will have, about."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""
        return self.shards.shard(self.index).replace("/", "-").removesuffix(".arrow")


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Gathers the shard's examples from every file and puts them into their final order.

    That takes two sweeps over the files: the first finds out where an example goes, the second copies it there. So
    the shard is in memory once, and its sources are never in memory together.
    """
    schema = map_batches(task.folder / task.paths[0]).schema
    keys, sizes, num_masked, others = [], [], [], []
    for examples in _slices(task):
        keys.append(np.array(examples[KEY]))
        sizes.append(np.diff(examples["pieces"].offsets))
        num_masked.append(np.diff(examples["masked"].offsets))
        others.append([np.array(examples[name]) for name in schema.names[2:-1]])
    order = np.argsort(np.concatenate(keys), kind="stable")
    piece_starts, piece_ends = _places(np.concatenate(sizes), order)
    masked_starts, masked_ends = _places(np.concatenate(num_masked), order)
    item = schema.field("masked").type.value_type
    pieces = np.empty(piece_ends[-1] if len(order) else 0, schema.field("pieces").type.value_type.to_pandas_dtype())
    labels = np.empty(masked_ends[-1] if len(order) else 0, pieces.dtype)
    positions = np.empty(len(labels), item.field("position").type.to_pandas_dtype())
    row = 0
    for examples in _slices(task):
        end = row + examples.num_rows
        _scatter(*_flat(examples["pieces"], lambda values: values), piece_starts[row:end], pieces)
        _scatter(*_flat(examples["masked"], lambda values: values.field("piece")), masked_starts[row:end], labels)
        _scatter(*_flat(examples["masked"], lambda values: values.field("position")), masked_starts[row:end], positions)
        row = end
    columns = [np.concatenate(column)[order] for column in zip(*others, strict=True)]
    schema = schema.remove(schema.get_field_index(KEY))
    batch = example_batch(schema, Lists(pieces, piece_ends), positions, Lists(labels, masked_ends), *columns)
    return {"files": [write_batches(task.folder, task.shards.shard(task.index), schema, [batch]).as_json()]}


def _places(sizes: Array, order: Array) -> tuple[Array, Array]:
    """Finds where every example begins, in the order of the sources, and where it ends, in the order of the shard."""
    ends = np.cumsum(sizes[order])
    starts = np.empty_like(ends)
    starts[order] = ends - sizes[order]
    return starts, ends


def _flat(column: pa.ListArray, part: Callable[[pa.Array], pa.Array]) -> tuple[Array, Array]:
    """Gives the values of lists, and the offsets at which the lists begin and end in them."""
    return np.asarray(part(column.values)), np.asarray(column.offsets)


@compiled
def _scatter(values, offsets, starts, target):
    """Copies every list to its place in the target."""
    for row in range(starts.size):
        copy_items(target, starts[row], values, offsets[row], offsets[row + 1])


def _slices(task: ShardTask) -> Iterator[pa.RecordBatch]:
    """Finds the examples of the shard in every file: those with keys in its range."""
    low, high = (KEYS * index // task.total for index in (task.index, task.index + 1))
    for path in task.paths:
        batch = map_batches(task.folder / path).get_batch(task.batch)
        keys = np.asarray(batch[KEY])
        start = np.searchsorted(keys, np.uint64(low))
        stop = len(keys) if high == KEYS else np.searchsorted(keys, np.uint64(high))
        yield batch.slice(start, stop - start)
