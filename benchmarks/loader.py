#!/usr/bin/env python3
"""Measures how fast one rank's batches are prepared, on one core: as the thread beside a GPU does it.

    python benchmarks/loader.py --data data/wiki
    python benchmarks/loader.py --data data/wiki --length 512

A rank reads its own sequences alone, but needs the sizes of the global batch, which grows with the ranks. Both kinds
of masks take turns: those of the shards, and masks that are drawn anew. Seconds are CPU time of the thread: other
work on the machine does not count. The copy of each batch into pinned memory for a GPU is not measured.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rich.console import Console

from benchmarks.contests import alternate, spread
from benchmarks.measure import ResultsFile, run_command
from benchmarks.tables import show, summarise_loader
from benchmarks.texts import make_demo
from data_prep.common.errors import UserError
from data_prep.shards import Manifest
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.objectives.mlm import MaskedPieces, MaskedSettings

SEED = 12345
Masks = Literal["static", "dynamic"]
WAYS: tuple[Masks, ...] = ("static", "dynamic")
"""Masks of the shards, and masks that are drawn anew in each epoch."""
RANKS: Sequence[int] = (1, 8, 64, 512)
"""Numbers of ranks that share the global batch."""
SEQUENCES = 256
"""Sequences of a rank in a step."""
WARM_UP = 1
WANTED = 700_000
"""Pieces a second of base at 128 on an H200, by the goals of `make gpu`; measured were 779,000 with 2,048 sequences."""


@dataclass(frozen=True)
class Loader:
    """Measures how fast one rank's batches are prepared."""

    data: Path | None = None
    """Folder of shards (default: build/demo, made of the demo corpus if it is missing)."""
    length: int = 128
    """A length of the shards."""
    rounds: int = 7
    """Steps of which the median is taken."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results, by the hardware)."""


def open_dataset(data: Path, manifest: Manifest, length: int, ranks: int, masks: Masks) -> Dataset:
    """Opens the shards as the first rank does, which verifies its share of their checksums."""
    objective = MaskedPieces(MaskedSettings(masks=masks))
    return Dataset(data, manifest, length, rank=0, ranks=ranks, objective=objective)


def make_reader(dataset: Dataset, sequences: int, ranks: int) -> Callable[[], tuple[int, float]]:
    """Returns a function that prepares the first rank's next batch, and returns its pieces and CPU seconds."""
    order, steps = BatchOrder(Order(SEED, dataset.shard_rows), sequences * ranks), itertools.count()

    def read() -> tuple[int, float]:
        begin = time.thread_time()
        batches = step_batches(dataset, order, next(steps), 0, ranks)
        return sum(len(batch.pieces) for batch in batches.micro), time.thread_time() - begin

    return read


def measure_ranks(settings: Loader, data: Path, manifest: Manifest, ranks: int) -> list[dict[str, Any]]:
    """Measures pieces a CPU second for each kind of masks, and the ratio to what a GPU takes."""
    readers = {
        way: make_reader(open_dataset(data, manifest, settings.length, ranks, way), SEQUENCES, ranks) for way in WAYS
    }
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}

    def turn(way: Masks) -> float:
        pieces, seconds = readers[way]()
        speeds[way].append(pieces / seconds)
        return seconds

    alternate({way: partial(turn, way) for way in WAYS}, settings.rounds, WARM_UP)
    pieces = {way: spread(own[WARM_UP:], 0) for way, own in speeds.items()}
    about = {"length": settings.length, "sequences": SEQUENCES, "ranks": ranks}
    return [
        {**about, "masks": way, "pieces_per_second": each, "times_what_a_gpu_takes": round(each["median"] / WANTED, 1)}
        for way, each in pieces.items()
    ]


def measure(settings: Loader, console: Console) -> None:
    """Measures for all numbers of ranks; prints and writes the results."""
    if min(settings.rounds, settings.length) < 1:
        raise UserError("--rounds and --length: at least 1")
    keeper = ResultsFile("loader", ["torch", "numpy", "pyarrow"], settings.out, with_gpu=False)
    data = settings.data or make_demo(lambda line: console.print(line, markup=False))
    manifest = Manifest.read(data)
    if manifest.length_for(settings.length) is None:
        raise UserError(f"--length {settings.length}: {data} has {', '.join(map(str, manifest.lengths()))}")
    rows = [row for ranks in RANKS for row in measure_ranks(settings, data, manifest, ranks)]
    found = {"wanted": WANTED, "speeds": rows}
    show(console, summarise_loader(found))
    console.print(f"kept in {keeper.keep(found)}")


if __name__ == "__main__":
    run_command(Loader, measure)
