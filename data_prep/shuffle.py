"""Step 5, shards: all examples of the corpus in one range of keys, sorted by their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.examples import KEY
from data_prep.shards import ShardSet, map_batches, write_batches

KEYS = 1 << 64


@dataclass(frozen=True)
class ShardTask:
    """Write one shard."""

    folder: Path
    shards: ShardSet
    index: int
    total: int
    """shards of this set"""
    batch: int
    """the number of the set's record batch in each file of examples"""
    paths: tuple[str, ...]
    """the files of examples of this length"""
    weight: int
    """examples, about"""

    @property
    def name(self) -> str:
        return self.shards.shard(self.index).replace("/", "-").removesuffix(".arrow")


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Gathers the shard's examples from every file and puts them into their final order."""
    examples = pa.Table.from_batches(list(_slices(task))).combine_chunks()
    order = np.argsort(np.asarray(examples[KEY]), kind="stable")
    shard = examples.drop_columns([KEY]).take(pa.array(order)).combine_chunks()
    record = write_batches(task.folder, task.shards.shard(task.index), shard.schema, iter(shard.to_batches()))
    return {"files": [record.as_json()]}


def _slices(task: ShardTask) -> Iterator[pa.RecordBatch]:
    low, high = (KEYS * each // task.total for each in (task.index, task.index + 1))
    for path in task.paths:
        batch = map_batches(task.folder / path).get_batch(task.batch)
        keys = np.asarray(batch[KEY])
        start = np.searchsorted(keys, np.uint64(low))
        stop = len(keys) if high == KEYS else np.searchsorted(keys, np.uint64(high))
        yield batch.slice(start, stop - start)
