"""What others have published, and how far the model of planner.py is from it.

Constants are fitted to rows of one node alone; the model then says what more nodes do, and so does linear scaling.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from data_prep.common.toml_text import read_toml
from pretraining.config.settings import VOCABULARY
from pretraining.data.statistics import measure_sequences
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import num_parameters
from pretraining.optimizers.declaration import optimizers
from pretraining.planning.cost import (
    OF_DATASHEET,
    Cluster,
    Exchange,
    MicroBatch,
    step_time,
)
from pretraining.planning.machines import GPUS, find_network, gpu_cluster

FILE = Path(__file__).with_suffix(".toml")
Row = Mapping[str, Any]
SAVE_BYTES, STORAGE = 14, 1e9
"""Bytes of a parameter in a checkpoint, with its 16-bit copy, and bytes a second in which one process writes them while
all others wait: the order of what one stream to network storage does."""


def read_published() -> dict[str, Any]:
    """The file: `rows` of throughput, `hours` of whole runs, and their `sources`."""
    return read_toml(FILE.read_text())


@dataclass(frozen=True)
class Comparison:
    """A published figure of several nodes, beside what the model and linear scaling say."""

    run: str
    what: str
    gpus: int
    published: float
    modelled: float
    linear: float

    @property
    def error(self) -> float:
        return self.modelled / self.published - 1

    @property
    def linear_error(self) -> float:
        return self.linear / self.published - 1


def shared_by(row: Row) -> tuple[Cluster, Exchange]:
    """The ranks of a row, and what they exchange: all published runs join gradients in fp16, without ZeRO, after the
    last backward pass (NVIDIA's scripts: allreduce_post_accumulation_fp16; DeepSpeed's: delay_allreduce)."""
    per_node = min(row["gpus"], row["gpus_per_node"])
    network = find_network(row["network"])
    cluster = gpu_cluster(GPUS[row["gpu"]], "fp16", row["gpus"] // per_node, per_node, network)
    parameters = num_parameters(Shape.named(row["model"], VOCABULARY))
    return cluster, Exchange(parameters, 0, 2, optimizers()["lamb"].traffic, gradient_bytes=2, hides=False)


def work_of(row: Row, length: int) -> MicroBatch:
    """A micro-batch of full sequences, as the model has it."""
    shape = Shape.named(row["model"], VOCABULARY)
    statistics = measure_sequences(shape, length, None)
    return MicroBatch.of(shape, "fp16", row["micro_batch"], statistics.pieces, statistics.flops)


def step_seconds(row: Row, length: int, accumulation: int, pace: float) -> float:
    """A step where a micro-batch takes `pace` times as long as modelled."""
    cluster, sharing = shared_by(row)
    work = work_of(row, length)
    return step_time(
        cluster, replace(work, flops=pace * work.flops, traffic=pace * work.traffic), sharing, accumulation
    ).total


def fit_pace(rows: Sequence[Row]) -> float:
    """How much longer than modelled these rows of one node take: their sequences, their kernels."""

    def excess(pace: float) -> float:
        return median(math.log(rate_of(row, pace) / row["sequences_per_second"]) for row in rows)

    low, high = 0.01, 100.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def rate_of(row: Row, pace: float) -> float:
    """Sequences a second."""
    sequences = row["gpus"] * row["micro_batch"] * row["accumulation"]
    return float(sequences / step_seconds(row, row["length"], row["accumulation"], pace))


class Published:
    """All rows, sorted into runs."""

    def __init__(self) -> None:
        content = read_published()
        self.rows: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in content["rows"]:
            if "accumulation" in row:
                self.rows[row["run"], row["length"]].append(row)
        self.hours: dict[str, list[Row]] = defaultdict(list)
        for row in content["hours"]:
            if "phases" in row:
                self.hours[row["run"]].append(row)

    @cached_property
    def paces(self) -> dict[tuple[str, int], float]:
        """What rows of one node say of every run."""
        return {key: fit_pace([row for row in rows if is_single(row)]) for key, rows in self.rows.items()}

    def compare(self) -> Iterator[Comparison]:
        """Every figure of several nodes."""
        for (run, length), rows in self.rows.items():
            node = [row for row in rows if row["gpus"] == row["gpus_per_node"]]
            for row in rows:
                if not is_single(row):
                    rate, linear = row["sequences_per_second"], node[-1]["sequences_per_second"] / node[-1]["gpus"]
                    modelled = rate_of(row, self.paces[run, length])
                    yield Comparison(run, f"sequences/s at {length}", row["gpus"], rate, modelled, linear * row["gpus"])
        for run, rows in self.hours.items():
            [one] = [row for row in rows if is_single(row)]
            factor = one["hours"] / self.modelled_hours(one)
            for row in rows:
                if row is not one:
                    linear = one["hours"] * one["gpus"] / row["gpus"]
                    yield Comparison(run, "hours", row["gpus"], row["hours"], self.modelled_hours(row, factor), linear)

    def modelled_hours(self, row: Row, factor: float = 1.0) -> float:
        """The hours of all phases and of their checkpoints; `factor` times the pace of the throughputs."""
        seconds = 0.0
        for phase in row["phases"]:
            accumulation = phase["batch"] // (phase["micro_batch"] * row["gpus"])
            pace = factor * self.paces[row["run"], phase["length"]]
            step = step_seconds({**row, **phase}, phase["length"], accumulation, pace)
            seconds += phase["sequences"] / phase["batch"] * step
        parameters = num_parameters(Shape.named(row["model"], VOCABULARY))
        return float(seconds + row["saves"] * SAVE_BYTES * parameters / STORAGE) / 3600


def is_single(row: Row) -> bool:
    """Whether a row is of one node, or less."""
    return bool(row["gpus"] <= row["gpus_per_node"])


def fit_reach(rows: Sequence[Row]) -> float:
    """The share of the matrix rate that products reach: the median of the rows of one GPU, full sequences of 128."""
    found = []
    for row in rows:
        if row["gpus"] == 1 and row["length"] == 128 and row["padded"]:
            gpu, work = GPUS[row["gpu"]], work_of(row, 128)
            seconds = work.sequences / row["sequences_per_second"] - work.traffic / (OF_DATASHEET * gpu.bandwidth)
            found.append(work.flops / seconds / gpu.products)
    return float(median(found))


def fit_slowest(rows: Sequence[Row]) -> float:
    """How ranks differ, as a standard deviation: the median of what a node loses against one of its GPUs."""
    found = []
    for one, node in product(rows, rows):
        same = all(one.get(key) == node.get(key) for key in ("run", "length"))
        if same and "run" in one and one["gpus"] == 1 and node["gpus"] == node["gpus_per_node"]:
            lost = node["gpus"] * one["sequences_per_second"] / node["sequences_per_second"] - 1
            found.append(lost / math.sqrt(2 * math.log(node["gpus"])))
    return float(median(found))
