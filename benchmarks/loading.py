#!/usr/bin/env python3
"""Measures how long one core prepares a batch from 1, 3, 30 and 200 corpora, of the same text, and the files that
stay open.

python benchmarks/loading.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice, pairwise

from rich.console import Console

from benchmarks.contests import alternate
from benchmarks.measure import ResultsFile, run_command
from benchmarks.tables import build_table, show
from benchmarks.texts import find_shards
from data_prep.shards import Manifest
from pretraining.data.batches import step_batches
from pretraining.data.corpora import Corpora, CorpusFolder
from pretraining.data.dataset import Dataset
from pretraining.data.mixing import MixedOrder, Mixture, make_corpus_order
from pretraining.data.order import BatchOrder

NUMBERS, LENGTH, BATCH, ROUNDS, STEPS = (1, 3, 30, 200), 128, 256, 15, 8
"""Numbers of corpora; the length and number of the sequences of a batch; turns, and batches of a turn."""


@dataclass(frozen=True)
class Loading:
    """Measures how long one core prepares a batch from several corpora."""

    out: Path | None = None
    """File for the results (default: in benchmarks/results, by hardware)."""


def make_loader(folder: Path, number: int) -> Callable[[], float]:
    """Makes a function that prepares batches of corpora of one folder; it returns the processor's seconds for one."""
    manifest, steps = Manifest.read(folder), count()
    corpora = Corpora(tuple(CorpusFolder(f"c{index}", folder, manifest) for index in range(number)))
    dataset, slots = Dataset(corpora, LENGTH), Mixture.choose(corpora, LENGTH).make_slots(None)
    parts = zip(corpora.parts, pairwise(dataset.first_sets), strict=True)
    orders = [make_corpus_order(1, part.name, LENGTH, dataset.shard_rows[slice(*sets)]) for part, sets in parts]
    order = BatchOrder(MixedOrder(1, slots, orders, dataset.first_sets, [0] * number), BATCH)

    def prepare_batches() -> float:
        start = time.process_time()
        for step in islice(steps, STEPS):
            step_batches(dataset, order, step)
        return (time.process_time() - start) / STEPS

    return prepare_batches


def measure(wanted: Loading, console: Console) -> None:
    """Lets all numbers of corpora take turns, and keeps the seconds and the ratios to one corpus."""
    folder, rows = find_shards(None, console.print), []
    loaders = {f"{number}": make_loader(folder, number) for number in NUMBERS}
    turns = alternate(loaders, ROUNDS, warm_up=1)
    for name in loaders:
        row = {"corpora": int(name), "ms_of_a_batch": round(1000 * turns.summarise_side(name)["median"], 2)}
        rows.append({**row, "times": turns.compute_ratio(name, f"{NUMBERS[0]}")})
    show(console, [build_table("", rows)])
    found = {"sequences": BATCH, "length": LENGTH, "open_files": len(os.listdir("/proc/self/fd")), "rows": rows}
    console.print(f"kept in {ResultsFile('loading', ['numpy', 'torch'], wanted.out).keep(found)}", markup=False)


if __name__ == "__main__":
    run_command(Loading, measure, "mixtures")
