"""What Megatron-LM has published of models that GPUs share, and how far the planner's model of time is from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean
from typing import Any, NamedTuple

from support.published import read_published

from pretraining.architectures.declaration import find_architecture
from pretraining.model.shape import Shape
from pretraining.optimizers.declaration import optimizers
from pretraining.planning.amount import measure_sequences
from pretraining.planning.cost import MicroBatch, StepTraffic, estimate_step
from pretraining.planning.machines import GPUS, find_network, make_cluster
from pretraining.planning.memory import count_rank_parameters

LENGTH, VOCABULARY, PER_NODE, MICRO_BATCH = 1024, 51_200, 16, 8
FIGURES = ("efficiency", "speedup", "flops", "seconds")
"""The published figures, of which a row has one."""
Row = Mapping[str, Any]


def read_meshes() -> list[Row]:
    return list(read_published()["meshes"])


@dataclass(frozen=True)
class Comparison:
    """A published figure beside that of the model."""

    row: Row
    published: float
    modelled: float
    """by the model that is calibrated on one GPU"""
    times: float
    """how long it took, as times of what a plan says, which is not calibrated"""

    @property
    def error(self) -> float:
        return self.modelled / self.published - 1


@lru_cache
def make_shape(layers: int, hidden: int, heads: int) -> Shape:
    kind = find_architecture("gpt")
    given = {"layers": layers, "hidden": hidden, "heads": heads, "architecture": "gpt"}
    shape = kind.settings_type(**{**kind.defaults, **given}).shape(VOCABULARY)
    return shape.change_learning(objective="ltr", pairs=False, sees="before")


def count_flops(row: Row) -> float:
    """Counts the FLOPs of a step as the paper does."""
    shape = make_shape(row["layers"], row["hidden"], row["heads"]).change_learning(sees="both")
    return float(4 / 3 * row["batch"] * measure_sequences(shape, LENGTH, None).flops)


@lru_cache
def find_work(shape: Shape, tensor: int) -> tuple[MicroBatch, StepTraffic]:
    """Finds the work of a micro-batch on a rank, and what it exchanges in a step."""
    average = measure_sequences(shape.change_learning(sees="both"), LENGTH, None)
    work = MicroBatch.from_average(shape, "fp16", MICRO_BATCH, average, True, tensor, fused_attention=False)
    parameters, traffic = count_rank_parameters(shape, tensor), optimizers()["adamw"].traffic
    return work, StepTraffic(parameters, 0, 2, traffic, gradient_bytes=2, hides=False)


def step_seconds(row: Row, pace: float = 1.0) -> float:
    """A step where products and memory take `pace` times as long as modelled. Without ZeRO, gradients are joined in
    fp16 after the backward pass; attention keeps its probabilities; no kernel skips the pairs that nobody sees."""
    per_node = min(row["gpus"], PER_NODE)
    cluster = make_cluster(GPUS["v100-32"], "fp16", row["gpus"] // per_node, per_node, find_network("edr100x8"))
    work, exchange = find_work(make_shape(row["layers"], row["hidden"], row["heads"]), row["tensor"])
    slower = replace(work, flops=pace * work.flops, traffic=pace * work.traffic)
    accumulation = row["batch"] * row["tensor"] // row["gpus"] // MICRO_BATCH
    return estimate_step(cluster, slower, exchange, accumulation).total


class Software(NamedTuple):
    """What is fitted of the software."""

    pace: float
    """how much longer than modelled products and memory take"""
    fixed: float
    """seconds of a step that GPUs do not divide"""


def fit_software(rows: Iterable[Row]) -> Software:
    """Fits the software to the rows that are marked so: the pace to that of one GPU, for every fixed time; and of these
    the one with the least mean error of the others."""
    fitted = [row for row in rows if "fits" in row]
    found = [Software(fit_pace(fitted, fixed), fixed) for fixed in (0.01 * number for number in range(101))]
    return min(found, key=lambda software: find_mean_error(compare(fitted, software)))


def fit_pace(rows: Iterable[Row], fixed: float = 0.0) -> float:
    """Fits the pace to the row of one GPU."""
    one = find_one(rows)
    wanted, low, high = count_flops(one) / one["flops"] - fixed, 0.01, 10.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step_seconds(one, middle) < wanted else (low, middle)
    return low


def find_mean_error(found: Iterable[Comparison]) -> float:
    return mean(abs(each.error) for each in found)


def find_one(rows: Iterable[Row]) -> Row:
    """Finds the row of one GPU."""
    [one] = [row for row in rows if row["gpus"] == 1]
    return one


def compare(rows: Sequence[Row], software: Software) -> list[Comparison]:
    """Compares all rows but that of one GPU, to which the pace is fitted."""
    one = find_one(rows)
    return [_compare(row, one, software) for row in rows if row is not one]


def _compare(row: Row, one: Row, software: Software) -> Comparison:
    [name] = {*FIGURES} & row.keys()
    scale = {
        "efficiency": count_flops(row) / row["gpus"] / one["flops"],
        "speedup": count_flops(one) / one["flops"],
        "flops": count_flops(row),
        "seconds": 1.0,
    }[name]
    seconds = software.fixed + step_seconds(row, software.pace)
    modelled = seconds if name == "seconds" else scale / seconds
    took = row["seconds"] if name == "seconds" else scale / row[name]
    return Comparison(row, float(row[name]), modelled, took / step_seconds(row))
