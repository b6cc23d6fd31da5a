"""Steps 4 and 5 for one length: examples of every part, merged where the parts are many, and shards of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array
from data_prep.examples.making import ExamplesTask, make_examples, shard_sets
from data_prep.examples.merging import MergeTask, SortedFiles, merge, merging_rounds
from data_prep.examples.parts import Parts, read_parts
from data_prep.examples.shard_files import ShardTask, write_shard
from data_prep.running import Runner
from data_prep.settings import Settings
from data_prep.shards import ShardSet, example_schema
from data_prep.work import Record, Records

KEY_BYTES = 8  # that an example takes besides, until it is in a shard


@dataclass(frozen=True)
class Length:
    """The shards of one length, made of all parts of a corpus."""

    length: int
    folder: Path
    corpus_key: str
    """Stands for the parts, the documents held out and the vocabulary."""
    settings: Settings
    vocabulary_size: int

    @cached_property
    def parts(self) -> Parts:
        """Maps the parts of the corpus."""
        return read_parts(self.folder, self.corpus_key)

    @property
    def sets(self) -> list[ShardSet]:
        """Lists the sets of shards of the length."""
        return shard_sets(self.length, self.settings.duplicates, self.parts.held_out.size > 0)

    @property
    def schema(self) -> pa.Schema:
        """Gives the columns of the shards."""
        return example_schema(self.length, self.vocabulary_size, self.parts.num_documents)

    def make(self, runner: Runner) -> list[Record]:
        """Makes the shards, and deletes all that was needed for them alone; returns the figures of the sets."""
        files = SortedFiles(self.length, len(self.parts.paths))
        examples = runner.run(files.step, make_examples, self._examples, "pieces")
        totals = add_counts(record["counts"] for record in examples)
        sizes = [estimated_bytes(total, self.schema) for total in totals]
        keyed = sum(sizes) + KEY_BYTES * sum(total["examples"] for total in totals)
        for source, fan_in, target in merging_rounds(files, keyed, len(self.sets)):
            self._merge(runner, source, fan_in, target, keyed)
            files = target
        num_shards = [max(1, round(size / self.settings.shard_bytes)) for size in sizes]
        shards = runner.run(
            f"shards-{self.length}", write_shard, lambda: self._shards(files, totals, num_shards), "pieces"
        )
        runner.work.forget(files.step)
        return [
            {**asdict(shard_set), **total, "shards": written}
            for shard_set, total, written in zip(self.sets, totals, divided(shards, num_shards), strict=True)
        ]

    def _examples(self) -> Iterator[ExamplesTask]:
        """Makes a task of every part."""
        for part, pieces in enumerate(self.parts.pieces.tolist()):
            yield ExamplesTask(self.folder, part, self.length, self.corpus_key, self.settings, pieces)

    def _merge(self, runner: Runner, source: SortedFiles, fan_in: int, target: SortedFiles, total: int) -> None:
        """Merges all files of a round, and deletes each as soon as it is merged."""

        def tasks() -> Iterator[MergeTask]:
            for number in range(target.num_files):
                weight = total // target.num_files
                yield MergeTask(self.folder, source, target, number, fan_in, len(self.sets), weight)

        def delete(task: MergeTask) -> None:
            for path in task.consumed:
                (self.folder / path).unlink(missing_ok=True)

        runner.run(target.step, merge, tasks, "B", after=delete)
        runner.work.forget(source.step)

    def _shards(self, files: SortedFiles, totals: list[Record], num_shards: list[int]) -> Iterator[ShardTask]:
        """Makes a task of every shard."""
        for number, (shard_set, total, count) in enumerate(zip(self.sets, totals, num_shards, strict=True)):
            for index in range(count):
                yield ShardTask(self.folder, shard_set, index, count, number, files, total["pieces"] // count)


def divided(shards: Records, num_shards: list[int]) -> Iterator[list[Record]]:
    """Divides the records of shards, which follow each other, among their sets."""
    records = iter(shards)
    for count in num_shards:
        yield [file for _ in range(count) for file in next(records)["files"]]


def add_counts(records: Iterable[list[Record]]) -> list[Record]:
    """Adds up what the tasks have counted in their parts of every set of shards."""
    totals: list[dict[str, Array]] = []
    for counts in records:
        totals = totals or [{name: np.zeros_like(np.array(count)) for name, count in one.items()} for one in counts]
        for total, one in zip(totals, counts, strict=True):
            for name, count in one.items():
                total[name] += np.array(count)
    return [{name: count.tolist() for name, count in total.items()} for total in totals]


def estimated_bytes(counts: dict[str, Any], schema: pa.Schema) -> int:
    """Estimates what the examples of a set take in shards, which decides how many shards there are."""
    piece, position = schema.field("pieces").type.value_type.byte_width, schema.field("boundary").type.byte_width
    example = 4 + 4 + position + schema.field("document").type.byte_width + 1 / 8
    return int(counts["pieces"] * piece + counts["masked"] * (piece + position) + counts["examples"] * example)
