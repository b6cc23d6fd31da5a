"""A cache of the activations of frozen encoders: an Arrow file for every split, beside the runs of its task.

    OUT/sst2/activations/
      train.arrow  dev.arrow      a list of rows for every item, in the items' order, with a checksum
      lock                        held by the process that writes

All runs of the task map the files into memory; the first that needs them writes them while others wait. The schema has
a fingerprint of the encoders, the pieces of all items and this format: a file with another one, or a damaged file, is
reported and rewritten. If the files would exceed the limit or cannot be written, every epoch computes activations anew.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data_prep.arrow_files import make_list_offsets, make_list_type, make_schema, map_batches, read_batch
from data_prep.common.arrays import Array
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import replacing
from data_prep.common.locks import LOCK, HeldError, locked
from finetuning.inputs import Encoded, Items
from finetuning.model.features import FrozenEncoders
from finetuning.running.batches import count_pieces, encode_in_order, pack, split_by_pieces
from pretraining.engine.step import GivenUpError
from pretraining.processes.context import Context
from pretraining.processes.group import gather, shared_errors

FOLDER = "activations"
FORMAT = 2
"""Version of the files and of what is computed."""
GB = 1e9
WAIT_SECONDS = 0.2
"""Seconds between two looks at whether another process still writes."""
FINGERPRINT = b"fingerprint"
Say = Callable[[str], None]


@dataclass(frozen=True)
class KeptItems(Items):
    """The items of a split with their cached activations."""

    items: Items
    file: ActivationFile

    def __len__(self) -> int:
        return len(self.items)

    def encode(self, numbers: Array) -> Encoded:
        """Makes model inputs of these items."""
        return replace(self.items.encode(numbers), kept=self.file.read)


def measure_items(items: Items) -> tuple[int, str]:
    """Returns the number of rows that frozen encoders compute for a split, pieces or tagged words, and a checksum of
    the pieces of all items."""
    rows, seen = 0, hashlib.sha256()
    for _, encoded in encode_in_order(items):
        pieces, second = encoded.sequences
        looked_at = encoded.words or pieces
        rows += len(looked_at.values)
        for array in (pieces.values, pieces.ends, second, looked_at.values, looked_at.ends):
            seen.update(array.tobytes())
    return rows, seen.hexdigest()


@dataclass(frozen=True)
class ActivationFile:
    """The cached activations of a split."""

    path: Path
    layers: int
    width: int
    dtype: torch.dtype
    fingerprint: str

    @property
    def row(self) -> int:
        """Bytes of the activations of a piece or word."""
        return self.layers * self.width * self.dtype.itemsize

    def find_fault(self) -> str | None:
        """Finds what is wrong with an existing file; None if it is whole and of these encoders and items."""
        try:
            if (map_batches(self.path).schema.metadata or {}).get(FINGERPRINT) != self.fingerprint.encode():
                return f"{self.path}: of another model, other data or another version of Cloze"
            assert self._parts is not None, "every part was looked at"
        except DamageError as error:
            return str(error)
        return None

    def write(self, items: Items, frozen: FrozenEncoders, device: torch.device) -> Iterator[None]:
        """Writes the file, which gets its name once it is whole; yields after every batch."""
        schema = make_schema(rows=make_list_type(pa.binary(self.row)), checksum=pa.uint32())
        schema = schema.with_metadata({FINGERPRINT: self.fingerprint})
        with replacing(self.path) as file, pa.ipc.new_file(file, schema) as writer:
            for numbers, encoded in encode_in_order(items):
                for chosen in split_by_pieces(np.arange(len(encoded)), count_pieces(encoded)):
                    batch = pack(encoded, chosen, numbers)
                    computed = frozen.compute_rows(batch.to(device), self.dtype).cpu().contiguous()
                    rows = computed.flatten(1).view(torch.uint8).numpy()
                    lengths = batch.words_of_items if frozen.words else count_pieces(encoded)[chosen]
                    buffers = [None, pa.py_buffer(rows)]
                    data = pa.FixedSizeBinaryArray.from_buffers(pa.binary(self.row), len(rows), buffers)
                    lists = pa.ListArray.from_arrays(make_list_offsets(np.cumsum(lengths)), data, type=schema[0].type)
                    checksums = pa.array(_compute_checksums(rows, lists.offsets.to_numpy()), pa.uint32())
                    writer.write_batch(pa.record_batch([lists, checksums], schema=schema))
                    yield

    @cached_property
    def _parts(self) -> list[tuple[Array, Array]]:
        """The rows of every record batch in the mapped file, and the offsets of items. All are read once for their
        checksums, at 4 GB a second from memory."""
        reader, parts = map_batches(self.path), []
        for index in range(reader.num_record_batches):
            lists, checksums = read_batch(reader, index, self.path, full=False).columns
            if lists.type.value_type != pa.binary(self.row):
                raise DamageError(f"{self.path}: rows of another size")
            rows = np.frombuffer(lists.values.buffers()[1], np.uint8)[: len(lists.values) * self.row]
            part = rows.reshape(-1, self.row), lists.offsets.to_numpy()
            if _compute_checksums(*part) != checksums.to_pylist():
                raise DamageError(f"{self.path}: damaged: not what was written")
            parts.append(part)
        return parts

    @cached_property
    def _begins(self) -> Array:
        """The first item of every record batch."""
        return np.cumsum([0, *(len(offsets) - 1 for _, offsets in self._parts)])[:-1]

    def read(self, numbers: Array) -> Tensor:
        """Reads the activations (r, k, W) of these items, one after another."""
        found = [np.empty((0, self.row), np.uint8)]
        places = np.searchsorted(self._begins, numbers, "right") - 1
        for place, own in zip(places.tolist(), (numbers - self._begins[places]).tolist(), strict=True):
            rows, offsets = self._parts[place]
            found.append(rows[offsets[own] : offsets[own + 1]])
        bytes_ = np.concatenate(found)
        return torch.from_numpy(bytes_).view(self.dtype).reshape(len(bytes_), self.layers, self.width)


def _compute_checksums(rows: Array, offsets: Array) -> list[int]:
    """Computes the checksum of the rows of every item."""
    return [zlib.crc32(rows[begin:end].data) for begin, end in itertools.pairwise(offsets.tolist())]


@dataclass(frozen=True)
class ActivationCache:
    """Caches the activations of a task's splits."""

    frozen: FrozenEncoders
    dtype: torch.dtype
    folder: Path
    """The folder of the task's results."""
    limit: float
    """Maximum size of the files of all tasks of a command, in 10⁹ bytes."""
    context: Context
    say: Say
    called: str = ""
    """Suffix of the file names of encoders that other runs do not have."""

    def keep(self, splits: Mapping[str, Items]) -> Mapping[str, Items]:
        """Returns the items with their cached activations, or unchanged if these are too large. All ranks call it
        together."""
        kept, total = self._plan_files(splits)
        size = f"activations of {', '.join(splits)} take {total / GB:,.3g} GB"
        if not gather(self._has_room(total, kept))[0]:
            self.say(
                f"{size}, more than --features.cache_gb {self.limit:g} leaves: they are computed again in every epoch"
            )
            return splits
        self._write_missing(kept, f"{size}, and are kept in {self.folder / FOLDER}")
        if not all(gather(all(each.file.find_fault() is None for each in kept.values()))):
            self.say("activations are not kept on every machine: they are computed again in every epoch")
            return splits
        return kept

    def _plan_files(self, splits: Mapping[str, Items]) -> tuple[dict[str, KeptItems], int]:
        """Plans the files of all splits; returns the items with them, and their total size in bytes."""
        kept, total, of_encoders = {}, 0, self.frozen.compute_fingerprint(self.dtype)
        for split, items in splits.items():
            rows, pieces = measure_items(items)
            seen = hashlib.sha256(f"{FORMAT} {of_encoders} {pieces}".encode()).hexdigest()
            path = self.folder / FOLDER / f"{split}{self.called}.arrow"
            file = ActivationFile(path, self.frozen.count, self.frozen.width, self.dtype, seen)
            kept[split] = KeptItems(items, file)
            total += rows * file.row
        return kept, total

    def _has_room(self, total: int, kept: Mapping[str, KeptItems]) -> bool:
        """Tells whether the files fit the limit, beside those of other tasks and encoders."""
        own = {each.file.path for each in kept.values()}
        others = [path for path in self.folder.parent.glob(f"*/{FOLDER}/*.arrow") if path not in own]
        return total + sum(path.stat().st_size for path in others) <= self.limit * GB

    def _write_missing(self, kept: Mapping[str, KeptItems], what: str) -> None:
        """Lets the first rank of every machine write missing files; GivenUpError if a signal asks to stop."""
        steps = self._write_in_steps(kept, what) if self.context.world.local_rank == 0 else iter(())
        is_done = False
        while not is_done:
            self.context.watch.mark()
            if self.context.control.stop_requested_anywhere():
                raise GivenUpError
            with shared_errors():
                has_more = next(steps, steps) is None
            is_done = not any(gather(has_more))

    def _write_in_steps(self, kept: Mapping[str, KeptItems], what: str) -> Iterator[None]:
        """Writes missing files a batch at a time, once no other process does."""
        with ExitStack() as stack:
            try:
                while not self._try_lock(stack):
                    yield
                for each in kept.values():
                    if each.file.path.exists():
                        if (fault := each.file.find_fault()) is None:
                            continue
                        self.say(f"{fault}; written anew")
                    if what:
                        self.say(what)
                    what = ""
                    yield from each.file.write(each.items, self.frozen, self.context.device)
            except UserError as error:  # a disk that is full, a folder that may not be written
                self.say(f"{error}: activations are computed again in every epoch")

    def _try_lock(self, stack: ExitStack) -> bool:
        """Tries to take the lock until the end of the stack; tells whether it did."""
        try:
            stack.enter_context(locked(self.folder / FOLDER / LOCK, str(self.folder), "{owner} writes activations"))
        except HeldError:
            time.sleep(WAIT_SECONDS)
            return False
        return True
