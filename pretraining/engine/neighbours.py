"""The ranks of one machine share weights in memory and read one another's gradients there.

Through sockets, each number would be copied four times. Here each rank has a room, memory that the other ranks map. It
writes its gradients there, waits for the other ranks, and reads theirs. The weights are in the room of rank 0: each
rank writes its own share while no rank reads. They wait for one another by gloo, which notices a dead rank.
A room has no name in the file system, and ends with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining.engine.buckets import Bucket
from pretraining.engine.exchange import Exchange
from pretraining.processes.group import gather, host_group, place, wait_for_all

WHOLE = -1
"""The note of a parameter that is shown whole; the note of another parameter is its number of rows."""
ALIGNED = 64
"""The parts of a room are multiples of these bytes."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux says which start of which machine this is."""


class SharedFile(NamedTuple):
    """Where other processes of the same user find the file of a room."""

    boot: str
    """The start of the machine on which the file is."""
    path: str
    device: int
    number: int
    """Inode of the file. In another PID namespace the same path may lead to another file."""


class Spot(NamedTuple):
    """The place of a bucket in a room."""

    sums: int
    notes: int


class Neighbours(Exchange):
    """Exchanges gradients and weights between the ranks of one machine, through their rooms."""

    shares_weights = True

    def __init__(
        self, rooms: Sequence[Tensor], numbers: int, notes: int, rank: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Takes the rooms of all ranks, each with space for `numbers` of a type and `notes` in int64."""
        ends = _align(8 * notes), _align(8 * notes) + _align(dtype.itemsize * numbers)
        self.notes = [room[: ends[0]].view(torch.int64) for room in rooms]
        self.sums = [room[ends[0] : ends[1]].view(dtype) for room in rooms]
        self._left = rooms[0][ends[1] :]
        self.rank, self.others = rank, [other for other in range(len(rooms)) if other != rank]

    def place(self, weights: Tensor) -> Tensor:
        """Puts the weights of rank 0 into the memory that all ranks share."""
        mine = weights.view(-1).view(torch.uint8)
        common, self._left = self._left[: len(mine)], self._left[_align(len(mine)) :]
        if self.rank == 0:
            common.copy_(mine)
        wait_for_all()
        return common.view(weights.dtype).view_as(weights)

    def join(self, buckets: Sequence[Bucket]) -> None:
        """Adds the sums of the other ranks to this rank's shares of the buckets. All ranks must wait for one another
        before the next call."""
        for bucket in buckets:
            bucket.complete()
        for number, load in enumerate(self._loads(buckets)):
            if number:
                wait_for_all()  # the others have read the one before
            for bucket, spot in load:
                self._show(bucket, spot)
            wait_for_all()
            for other in self.others:
                for bucket, spot in load:
                    self._add(bucket, spot, other)

    def _loads(self, buckets: Sequence[Bucket]) -> Iterator[list[tuple[Bucket, Spot]]]:
        """Yields lists of buckets that fit a room together, each with its place in it."""
        load: list[tuple[Bucket, Spot]] = []
        sums = notes = 0
        for bucket in buckets:
            if sums + len(bucket.sums) > len(self.sums[0]):
                yield load
                load, sums, notes = [], 0, 0
            load.append((bucket, Spot(sums, notes)))
            sums, notes = sums + len(bucket.sums), notes + count_notes(bucket.views.values())
        yield load

    def _show(self, bucket: Bucket, spot: Spot) -> None:
        """Writes this rank's sums of other ranks' shares to its room; of sparse tables, only the rows that are not
        zero."""
        sums, notes = self.sums[self.rank][spot.sums :], self.notes[self.rank][spot.notes :]
        counts = [len(bucket.rows[number]) if number in bucket.rows else WHOLE for number in bucket.views]
        note = torch.cat(
            [torch.tensor(counts), *(bucket.rows[number] for number in bucket.views if number in bucket.rows)]
        )
        notes[: len(note)] = note
        for number, rows in bucket.rows.items():
            table = bucket.views[number]
            sums[bucket.place(number)].view_as(table)[rows] = table[rows]
        for share in bucket.shares:
            if share.owner != self.rank:
                for part in bucket.find_parts(share, without=bucket.rows):
                    sums[part].copy_(bucket.sums[part])

    def _add(self, bucket: Bucket, spot: Spot, other: int) -> None:
        """Adds the sums that another rank shows. Its rows may belong to other shares too, whose sums nobody reads
        here."""
        sums, notes = self.sums[other][spot.sums :], self.notes[other][spot.notes :]
        counts = dict(zip(bucket.views, notes[: len(bucket.views)].tolist(), strict=True))
        tables = {number: count for number, count in counts.items() if count != WHOLE}
        note = notes[len(counts) : len(counts) + sum(tables.values())].clone()
        which = torch.split(note, [*tables.values()])
        for number, rows in zip(tables, which, strict=True):
            bucket.add_rows(number, rows, sums[bucket.place(number)].view_as(bucket.views[number])[rows])
        for number in bucket.rows.keys() - tables.keys():
            del bucket.rows[number]
        for share in bucket.shares:
            if share.owner == self.rank:
                for part in bucket.find_parts(share, without=tables):
                    bucket.sums[part].add_(sums[part])


def find_neighbours(
    parameters: Sequence[Tensor], most_sums: int, dtype: torch.dtype = torch.float32, padding: int = 0
) -> Neighbours | None:
    """Makes the rooms for these parameters, with space for `most_sums` sums of a type, or those of the longest
    parameter, and for `padding` numbers between parameters. Returns None where a rank cannot map the room of another.
    All ranks must call it."""
    rank, ranks = place()
    if ranks == 1 or dist.get_backend(host_group()) != "gloo":  # a group that is pretended says nothing
        return None
    spare = ranks * ALIGNED * len(parameters) + padding  # DeepSpeed may add some at the ends of its flat tensors
    sums = max(max(map(torch.numel, parameters)), min(sum(map(torch.numel, parameters)), most_sums)) + spare
    notes, weights = count_notes(parameters), sum(parameter.nbytes for parameter in parameters) + 4 * spare
    length = _align(8 * notes) + _align(dtype.itemsize * sums) + _align(weights)
    file = os.memfd_create("room")
    os.truncate(file, length)
    places = [SharedFile(*shared) if shared else None for shared in gather(_locate_file(file))]
    rooms = [_map_file(shared, length) for shared in places]
    entered = [torch.frombuffer(room, dtype=torch.uint8, count=length) for room in rooms if room is not None]
    all_entered = all(gather(len(entered) == ranks))
    os.close(file)
    return Neighbours(entered, sums, notes, rank, dtype) if all_entered else None


def count_notes(parameters: Iterable[Tensor]) -> int:
    """Counts the most notes of these parameters: a number of rows for each, and all rows."""
    return sum(1 + len(parameter) for parameter in parameters)


def _align(length: int) -> int:
    return -(-length // ALIGNED) * ALIGNED


def _locate_file(file: int) -> SharedFile | None:
    """Says where others find a file that this process has open; None on a system that does not tell."""
    found = os.fstat(file)
    with suppress(OSError):
        return SharedFile(BOOT.read_text(), f"/proc/{os.getpid()}/fd/{file}", found.st_dev, found.st_ino)
    return None


def _map_file(file: SharedFile | None, length: int) -> mmap.mmap | None:
    """Maps the memory that a rank shares; None if this process may not open it, or the path leads to another file."""
    with suppress(OSError, ValueError):
        found = None if file is None or BOOT.read_text() != file.boot else os.stat(file.path)
        if file is not None and found is not None and (found.st_dev, found.st_ino) == (file.device, file.number):
            with open(file.path, "r+b", buffering=0) as opened:
                return mmap.mmap(opened.fileno(), length)
    return None
