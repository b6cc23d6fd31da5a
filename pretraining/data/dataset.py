"""The examples of one length, of one corpus or several: maps shards into memory, and reads any rows of them as flat
arrays.

Examples of a length that the shards do not have are cut out of the next longer ones (`rows.py`). Opening reads only the
manifest. One of the ranks compares a shard with its checksum before its first use; values that could crash a kernel are
checked in every read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import read_shard
from data_prep.common.arrays import Array, ranges
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, wait_for_storage
from data_prep.shards import MANIFEST, Manifest, ShardSet, example_schema
from pretraining.data.corpora import Corpora, CorpusFolder
from pretraining.data.order import Examples
from pretraining.model.rows import Draw, Rows, Window
from pretraining.model.shape import OBJECTIVE
from pretraining.objectives.declaration import Objective, objectives

if TYPE_CHECKING:
    from data_prep.vocabulary.vocabulary import Special
    from pretraining.model.batch import PretrainingBatch

OPEN_SHARDS = 8
"""The number of shards that stay mapped. For each corpus there are two more, since a batch needs one or two of each; a
mapped shard takes no file descriptor."""
CURE = "copy it again from where it came, or make the folder anew with data_prep/shard.py"


class Dataset:
    """All examples of one length: of every duplicate, or those held out for validation. It is not thread-safe."""

    def __init__(
        self,
        corpora: Corpora,
        length: int,
        validation: bool = False,
        rank: int = 0,
        ranks: int = 1,
        objective: Objective | None = None,
    ) -> None:
        """`objective` makes batches of examples; None is the default objective."""
        self.objective = objective or objectives()[OBJECTIVE]
        self.corpora, self.length, self.rank, self.ranks = corpora, length, rank, ranks
        self.stored = corpora.common.length_for(length) or length
        """The length of the examples in the shards; where it is greater than `length`, they are cut."""
        found = [find_sets(part.folder, part.manifest, self.stored, validation) for part in corpora.parts]
        self.first_sets = np.cumsum([0, *map(len, found)]).tolist()
        """The number of each corpus's first set; the sets, a duplicate each, of all corpora follow one another."""
        sets = [records for of_part in found for records in of_part]
        self.vocabulary_size = corpora.common.vocabulary_size
        self.shard_rows = tuple(tuple(record.rows for record in records) for records in sets)
        self.records = [record for records in sets for record in records]
        """The shards of all sets; a shard's number in the dataset is its index here."""
        self._first = np.cumsum([0, *map(len, sets)])  # the number of each set's first shard
        self._parts = np.repeat(np.arange(len(found)), [sum(map(len, each)) for each in found])  # the corpus of each
        most = OPEN_SHARDS if validation else OPEN_SHARDS + 2 * (len(found) - 1)
        self._shard = lru_cache(maxsize=most)(self._open_shard)
        self._checked: set[int] = set()

    def corpus_of(self, shard: int) -> CorpusFolder:
        """Returns the corpus of a shard."""
        return self.corpora.parts[int(self._parts[shard])]

    def find_parts(self, batch: PretrainingBatch) -> Array:
        """Finds the corpus of each prediction of a batch in the host's memory, by its number, (m,)."""
        sequences = np.searchsorted(batch.starts.numpy(), batch.chosen.numpy(), side="right") - 1
        return np.asarray(self._parts[batch.examples[sequences, 0]])

    def name(self, shard: int, row: int) -> str:
        """Names an example in messages."""
        return f"{self.corpus_of(shard).folder / self.records[shard].path}: example {row}"

    def first_examples(self, count: int, number: int = 0) -> Examples:
        """Picks the first examples of the first duplicate of a corpus, in the order of its shards, which are
        shuffled."""
        duplicate = self.first_sets[number]
        rows = self.shard_rows[duplicate]
        shard = np.repeat(np.arange(len(rows)), rows)[:count]
        row = np.concatenate([np.arange(size) for size in rows])[:count]
        return Examples(np.full_like(shard, duplicate), shard, row)

    def sizes(self, examples: Examples, done: float = 0.0, one_way: Array | None = None) -> tuple[Array, Array]:
        """Counts the pieces and the predictions of examples; this reads very little. `done` is that of their `Draw`,
        `one_way` what the objective drew."""
        found = self._find_rows(examples)
        lengths, masked = found.restore(found.lengths), found.restore(found.predictions)
        if self.stored > self.length:
            window = Window.choose(lengths, found.restore(found.boundaries), self.length)
            [positions] = found.gather(("positions",), found.masked_starts, found.predictions)
            lengths, masked = window.lengths, window.count(positions, masked)
        return lengths, self.objective.count_predictions(lengths, masked, done, one_way)

    def batch(self, examples: Examples) -> PretrainingBatch:
        """Reads examples as a batch for validation, the same every time."""
        return self.objective.validation_batch(self.read(examples))

    def training_batch(self, examples: Examples, keys: Array, done: float) -> PretrainingBatch:
        """Reads examples as a batch for training; `keys` and `done` are those of a `Draw`."""
        if (one_way := self.objective.draw_one_way(keys)) is not None:
            order = np.argsort(~one_way, kind="stable")
            examples, keys = examples.take(order), keys[order]
        draw = Draw(keys, done, self.vocabulary_size, self._special.mask, self._special.sep)
        return self.objective.batch(self.read(examples), draw)

    @cached_property
    def _special(self) -> Special:
        from data_prep.vocabulary.source import read_vocabulary  # loads numba, which the order does not need

        return read_vocabulary(self.corpora.folder).special

    def read(self, examples: Examples) -> Rows:
        """Reads examples in their given order."""
        found = self._find_rows(examples)
        where = np.stack([self._first[examples.duplicate] + examples.shard, examples.row], axis=1)
        [pieces] = found.gather(("pieces",), found.starts, found.lengths)
        positions, labels = found.gather(("positions", "labels"), found.masked_starts, found.predictions)
        lengths, boundaries, random_next, predictions = map(
            found.restore, (found.lengths, found.boundaries, found.random_next, found.predictions)
        )
        rows = Rows(where, lengths, pieces, boundaries, random_next, predictions, positions, labels)
        self._check_values(rows)
        return rows.shorten(self.length) if self.stored > self.length else rows

    def _find_rows(self, examples: Examples) -> _FoundRows:
        """Finds where examples lie in their shards; the counts are checked, since memory is read by them."""
        numbers = self._first[examples.duplicate] + examples.shard
        order = np.argsort(numbers, kind="stable")
        row = examples.row[order]
        changes = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        cuts, table = [*changes.tolist(), len(row)], np.empty((6, len(row)), np.int64)
        parts = []
        for first, stop in pairwise(cuts):
            shard, rows = self._shard(int(numbers[order[first]])), row[first:stop]
            shard.look_up(rows, table[:, first:stop])
            parts.append((shard, slice(first, stop)))
        table[1] -= table[0]
        table[3] -= table[2]
        found = _FoundRows(order, parts, *table)
        found.check(row, self.stored)
        return found

    def _open_shard(self, number: int) -> _Shard:
        """Opens a shard, as soon as its storage answers."""
        return wait_for_storage(partial(self._map_shard, number), self.corpus_of(number).folder / MANIFEST)

    def _map_shard(self, number: int) -> _Shard:
        """Maps a shard; the first time, one rank compares its content with its record, all ranks its size."""
        record, corpus = self.records[number], self.corpus_of(number)
        path = corpus.folder / record.path
        is_mine = number % self.ranks == self.rank
        if number not in self._checked and (is_mine or not path.is_file() or path.stat().st_size != record.size):
            try:
                record.check(corpus.folder)
            except DamageError as error:
                raise DamageError(f"{error}; {CURE}") from error
        self._checked.add(number)
        schema = example_schema(self.stored, self.vocabulary_size, corpus.manifest.num_documents)
        return _Shard.map(corpus.folder, record, schema, self.stored)

    def _check_values(self, rows: Rows) -> None:
        """Refuses values that would make the model read beyond its tables."""
        sequences = np.arange(len(rows.lengths))
        lengths = np.repeat(rows.lengths, rows.predictions)
        vocabulary = f"the vocabulary of {self.vocabulary_size:,}"
        checks = [
            (f"a piece beyond {vocabulary}", rows.pieces >= self.vocabulary_size, rows.lengths),
            (f"a masked piece beyond {vocabulary}", rows.labels >= self.vocabulary_size, rows.predictions),
            ("a masked position beyond its end", rows.positions >= lengths, rows.predictions),
            ("a boundary beyond its end", rows.boundaries > rows.lengths, np.ones_like(sequences)),
        ]
        for what, wrong, counts in checks:
            if wrong.any():
                shard, row = rows.where[np.repeat(sequences, counts)[np.argmax(wrong)]]
                raise DamageError(f"{self.name(shard, row)} has {what}; {CURE}")


def find_sets(folder: Path, manifest: Manifest, length: int, validation: bool) -> list[list[FileRecord]]:
    """Finds the shards of a length, duplicate by duplicate; UserError where there are none."""
    sets = manifest.sets()
    found = [sets[key] for key in sorted(sets) if key.length == length and key.validation == validation]
    if found and all(sum(record.rows for record in records) for records in found):
        return found
    what = "examples held out for validation" if validation else "training examples"
    lengths = ", ".join(map(str, sorted({key.length for key in sets if key.validation == validation}))) or "none"
    cure = f"data_prep/shard.py --lengths {length}{' --validation 0.005' * validation}"
    raise UserError(f"{folder}: no {what} of length {length} (lengths there: {lengths}); make shards with: {cure}")


def num_held_out(manifest: Manifest, length: int) -> int:
    """Counts the examples held out for the validation of a phase of this length."""
    stored = manifest.length_for(length) or length
    return sum(record.rows for record in manifest.sets().get(ShardSet(stored, 0, validation=True), []))


@dataclass(frozen=True)
class _FoundRows:
    """Where examples lie in their shards. The arrays are in the order of the shards, and so few calls serve examples
    of many shards."""

    order: Array
    """index of each among the examples"""
    parts: list[tuple[_Shard, slice]]
    """the shards, and which of these examples are theirs"""
    starts: Array
    lengths: Array
    masked_starts: Array
    predictions: Array
    boundaries: Array
    random_next: Array

    def check(self, row: Array, longest: int) -> None:
        """Refuses impossible lengths."""
        counts = [rows.stop - rows.start for _, rows in self.parts]
        wrong = np.zeros(len(row), bool)
        for column, starts, sizes, least in (
            ("pieces", self.starts, self.lengths, 1),
            ("labels", self.masked_starts, self.predictions, 0),
        ):
            limits = np.repeat([len(getattr(shard, column)) for shard, _ in self.parts], counts)
            wrong |= (sizes < least) | (sizes > longest) | (starts < 0) | (starts + sizes > limits)
        if wrong.any():
            index = int(np.argmax(wrong))
            path = next(shard.path for shard, rows in self.parts if index < rows.stop)
            raise DamageError(f"{path}: example {row[index]} has no possible length; {CURE}")

    def restore(self, values: Array) -> Array:
        """Returns values in the order of the examples."""
        restored = np.empty_like(values)
        restored[self.order] = values
        return restored

    def gather(self, columns: Sequence[str], starts: Array, counts: Array) -> list[Array]:
        """Gathers these stretches of columns, joined in the order of the examples."""
        given = self.restore(counts)
        target, source = ranges((np.cumsum(given) - given)[self.order], counts), ranges(starts, counts)
        ends = np.concatenate([[0], np.cumsum(counts)]).tolist()
        found = [np.empty(len(target), np.int64) for _ in columns]
        for shard, rows in self.parts:
            part = slice(ends[rows.start], ends[rows.stop])
            for column, values in zip(columns, found, strict=True):
                values[target[part]] = getattr(shard, column)[source[part]]
        return found


@dataclass(frozen=True)
class _Shard:
    """Views of a mapped shard's columns; data are read on access."""

    path: Path
    random_next: Array
    """bits, eight in a byte; that of row 0 is `first_bit`"""
    first_bit: int
    offsets: Array
    pieces: Array
    masked_offsets: Array
    positions: Array
    labels: Array
    boundaries: Array

    @classmethod
    def map(cls, folder: Path, record: FileRecord, schema: pa.Schema, length: int) -> _Shard:
        """Opens a shard, whose columns and number of rows must be those that the manifest promises."""
        path = folder / record.path
        try:
            batch = read_shard(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DamageError(f"{path}: cannot be read: {error}; {CURE}") from error
        if batch.schema != schema or batch.num_rows != record.rows:
            raise DamageError(
                f"{path}: {batch.num_rows:,} rows of {batch.schema.names}; its manifest promises "
                f"{record.rows:,} examples of length {length}; {CURE}"
            )
        pieces, masked, masks = batch["pieces"], batch["masked"], batch["masked"].values
        lists = (pieces.offsets, pieces.values, masked.offsets, masks.field("position"), masks.field("piece"))
        random_next = batch["random_next"]
        bits = np.frombuffer(random_next.buffers()[1] or b"", np.uint8)
        return cls(path, bits, random_next.offset, *map(np.asarray, (*lists, batch["boundary"])))

    def look_up(self, rows: Array, found: Array) -> None:
        """Writes a line for each of: where the pieces of rows begin and end, and their masks; the boundary; the bit
        of `random_next`."""
        after = rows + 1
        columns = (self.offsets, rows), (self.offsets, after), (self.masked_offsets, rows), (self.masked_offsets, after)
        for line, (column, places) in zip(found, (*columns, (self.boundaries, rows)), strict=False):
            line[:] = column[places]
        places = rows + self.first_bit
        found[-1] = self.random_next[places >> 3] >> (places & 7) & 1
