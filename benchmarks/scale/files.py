"""What ranks ask of a file system that all of them share: at the start of Python, to go on, and for a batch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from data_prep.common.files import FileRecord
from data_prep.shards import Manifest
from pretraining.checkpoint import reading
from pretraining.checkpoint.reading import StoredTensors, find_fault, parameter_sizes
from pretraining.checkpoint.record import KINDS, MOMENTS, CheckpointRecord, MadeBy, read_record, write_record
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.model.shape import Shape

SHAPE = Shape(layers=4, hidden=256, heads=4, intermediate=1024, vocabulary=8192)
COUNTED = """
import os, sys
opened = set()
sys.addaudithook(lambda name, what: opened.add(what[0]) if name == "open" and isinstance(what[0], str) else None)
import pretraining.train, deepspeed
opened |= {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
sizes = [os.path.getsize(path) for path in opened if os.path.isfile(path)]
print(len(sizes), sum(sizes))
"""


def measure_launch() -> dict[str, float]:
    """Files that a rank opens before it has read its arguments, their megabytes, and all questions to the file system
    where strace can count them."""
    program = [sys.executable, "-c", COUNTED]
    begin = time.monotonic()
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - begin
    files, size = map(int, done.stdout.split()[-2:])
    found: dict[str, float] = {"files": files, "megabytes": round(size / 1e6), "seconds": round(seconds, 1)}
    try:
        traced = subprocess.run(
            ["strace", "-f", "-c", "-U", "calls,name", "-e", "trace=%file", *program], capture_output=True, text=True
        )
    except OSError:
        return found
    totals = [line.split() for line in traced.stderr.splitlines() if line.strip().endswith("total")]
    return {**found, "questions": int(totals[-1][0])} if totals else found


def write_checkpoint(folder: Path, ranks: int) -> CheckpointRecord:
    """A checkpoint of a small model as so many ranks write it under ZeRO 1: each a part of all parameters in a row."""
    folder.mkdir(parents=True)
    sizes = {name: size.numel() for name, size in parameter_sizes(SHAPE).items()}
    share = -(-sum(sizes.values()) // ranks)
    files = []
    for rank in range(ranks):
        part = {key: torch.zeros(length) for key, length in _part(sizes, rank * share, (rank + 1) * share)}
        for kind in KINDS:
            name = f"{kind}-{rank:05}-of-{ranks:05}.safetensors"
            save_file(part, folder / name)
            files.append(FileRecord.of(folder, name))
    states = tuple({"totals": {"loss": 1.0, "pieces": 1e6}, "seconds": 1.0} for _ in range(ranks))
    record = CheckpointRecord(SHAPE, 1, 1.0, None, MadeBy(ranks, 1, "bf16"), {}, tuple(files), states)
    write_record(folder, record)
    return record


def _part(sizes: dict[str, int], begin: int, end: int) -> Iterator[tuple[str, int]]:
    """The stretches of parameters between two places of all parameters in a row."""
    first = 0
    for name, size in sizes.items():
        start, stop = max(begin, first), min(end, first + size)
        if start < stop:
            yield f"{name}:{start - first}", stop - start
        first += size


def measure_checkpoint(folder: Path, ranks: int) -> dict[str, float]:
    """What a rank in the middle asks of a checkpoint that as many ranks have written, and what rank 0 does."""
    begin = time.monotonic()
    record = write_checkpoint(folder, ranks)
    found = {"files": len(record.files) + 1, "seconds_to_write_all": round(time.monotonic() - begin, 2)}
    found["bytes_of_record"] = (folder / "checkpoint.json").stat().st_size
    found["seconds_to_read_record"] = _seconds(lambda: read_record(folder))
    rank = ranks // 2
    found["seconds_to_check_own_share"] = _seconds(lambda: find_fault(folder, rank, ranks))
    sizes = parameter_sizes(SHAPE)
    numbers = {name: size.numel() for name, size in sizes.items()}
    share = -(-sum(numbers.values()) // ranks)
    with _as_rank(rank, ranks), _opened() as opened:
        found["seconds_for_moments"] = _seconds(lambda: _read_own(folder, record, numbers, rank * share, share))
    found["files_opened_for_moments"] = len(opened)
    with _as_rank(0, 1), _opened() as opened:
        found["seconds_for_weights_on_rank_0"] = _seconds(lambda: reading.read_weights(folder, sizes))
    found["files_opened_for_weights_on_rank_0"] = len(opened)
    return found


def _read_own(folder: Path, record: CheckpointRecord, sizes: dict[str, int], begin: int, share: int) -> None:
    for kind in MOMENTS:
        stored = StoredTensors(folder, record, kind)
        for key, length in _part(sizes, begin, begin + share):
            name, _, start = key.rpartition(":")
            stored.read(name, torch.empty(length), int(start))


def _seconds(act: Any) -> float:
    begin = time.perf_counter()
    act()
    return round(time.perf_counter() - begin, 4)


@contextmanager
def _as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Lets this process be one of many ranks to what reads checkpoints."""
    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_rank", lambda: rank),
        patch.object(dist, "get_world_size", lambda: ranks),
    ):
        yield


@contextmanager
def _opened() -> Iterator[list[Path]]:
    """Notes the files of a checkpoint that are opened."""
    opened: list[Path] = []

    def noted(path: Path, framework: str) -> Any:
        opened.append(path)
        return safe_open(path, framework)

    with patch.object(reading, "safe_open", noted):
        yield opened


def measure_batch(shards: Path, ranks: int, sequences: int) -> dict[str, float]:
    """What one rank of many does for a global batch of so many sequences of each rank: seconds of its loader, the bytes
    of its own examples, and the shards that it opens."""
    manifest = Manifest.read(shards)
    length = manifest.lengths()[0]
    dataset = Dataset(shards, manifest, length, rank=ranks // 2, ranks=ranks)
    order = BatchOrder(Order(1, dataset.shard_rows), ranks * sequences)
    step_batches(dataset, order, 0, ranks // 2, ranks)  # the shards are opened and one may be checked
    begin = time.perf_counter()
    batches = step_batches(dataset, order, 0, ranks // 2, ranks)
    seconds = time.perf_counter() - begin
    pieces = sum(len(batch.pieces) + 2 * len(batch.labels) for batch in batches.micro)
    examples = order.examples(0)
    return {
        "global_batch": ranks * sequences,
        "seconds": round(seconds, 4),
        "bytes_of_own_examples": pieces * np.dtype(np.uint16).itemsize,
        "shards_opened": len(np.unique(examples.shard)),
        "shards": len(dataset.records),
        "shards_checked_by_a_rank": round(len(dataset.records) / ranks, 3),
        "length": length,
    }
