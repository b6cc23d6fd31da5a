"""Step 5, shards: gathers all examples of the corpus in one range of keys, and sorts them by their keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.examples.assembly import KEY
from data_prep.examples.merging import KEYS, SortedFiles, gather, slices_between
from data_prep.shards import ShardSet, map_batches, write_batches


@dataclass(frozen=True)
class ShardTask:
    """Asks a worker for one shard."""

    folder: Path
    """The output folder."""
    shards: ShardSet
    index: int
    total: int
    """How many shards the set has."""
    set_index: int
    """The number of the set among those of its length."""
    files: SortedFiles
    weight: int
    """How many pieces the shard will have, about."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""
        return self.shards.shard(self.index).replace("/", "-").removesuffix(".arrow")


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Gathers the shard's examples from every sorted file and puts them into their final order."""
    low, high = (KEYS * index // task.total for index in (task.index, task.index + 1))
    readers = [map_batches(task.folder / task.files.path(number)) for number in range(task.files.num_files)]
    keyed = readers[0].schema
    slices = [part for reader in readers for part in slices_between(reader, task.files, task.set_index, low, high)]
    batch = gather(slices, keyed)
    schema = keyed.remove(keyed.get_field_index(KEY))
    batch = batch.select(schema.names)
    return {"files": [write_batches(task.folder, task.shards.shard(task.index), schema, [batch]).as_json()]}
