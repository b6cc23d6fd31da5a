"""What others have published, also of models that GPUs share, and how far the planner's model of time is from it.

Constants are fitted to rows of one node alone; the model then says what more nodes do, and so does linear scaling. Rows
that are `held_out` fit no constant of the model: they show how far software differs that it has never seen.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from statistics import mean, median
from typing import Any, NamedTuple

from conftest import ROOT

from data_prep.common.toml_text import read_toml
from pretraining.architectures.declaration import find_architecture, make_shape
from pretraining.config.settings import Dtype
from pretraining.model.shape import ARCHITECTURE, Shape
from pretraining.objectives.declaration import num_parameters
from pretraining.optimizers.declaration import optimizers
from pretraining.planning.amount import measure_sequences
from pretraining.planning.cost import OF_DATASHEET, REACH, MicroBatch, StepTraffic, estimate_step
from pretraining.planning.machines import GPUS, find_network, make_cluster
from pretraining.planning.memory import count_rank_parameters

FILE = ROOT / "benchmarks" / "published.toml"
VOCABULARY = find_architecture(ARCHITECTURE).vocabulary
Row = Mapping[str, Any]
Key = tuple[str, int]
"""A run and the length of its sequences."""
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


@cache
def find_work(model: str, dtype: Dtype, micro_batch: int, length: int) -> MicroBatch:
    """Finds the work of a micro-batch of full sequences, as the model has it."""
    shape = make_shape(model, VOCABULARY)
    return MicroBatch.from_average(shape, dtype, micro_batch, measure_sequences(shape, length, None))


def work_of(row: Row, length: int) -> MicroBatch:
    return find_work(row["model"], dtype_of(row), row["micro_batch"], length)


def dtype_of(row: Row) -> Dtype:
    """What a row keeps activations and gradients in: products in TF32 are of numbers in fp32."""
    return "fp32" if row.get("precision") == "tf32" else "fp16"


def step_seconds(row: Row, length: int, accumulation: int, pace: float) -> float:
    """A step where a micro-batch takes `pace` times as long as modelled.

    All published runs join gradients without ZeRO after the last backward pass, in fp16 but where products are in TF32
    (NVIDIA's scripts: allreduce_post_accumulation_fp16; DeepSpeed's: delay_allreduce).
    """
    per_node, network = min(row["gpus"], row["gpus_per_node"]), find_network(row["network"])
    dtype, tf32 = dtype_of(row), row.get("precision") == "tf32"
    gpu = GPUS[row["gpu"]]
    gpu = replace(gpu, products_fp32=gpu.products / 2) if tf32 else gpu
    cluster = make_cluster(gpu, dtype, row["gpus"] // per_node, per_node, network)
    size = 2 if dtype == "fp16" else 4
    parameters, traffic = count_parameters(row["model"]), optimizers()["lamb"].traffic
    exchange = StepTraffic(parameters, 0, size, traffic, gradient_bytes=size, hides=False)
    work = work_of(row, length)
    slower = replace(work, flops=pace * work.flops, traffic=pace * work.traffic)
    return estimate_step(cluster, slower, exchange, accumulation).total


@cache
def count_parameters(model: str) -> int:
    return num_parameters(make_shape(model, VOCABULARY))


def modelled_speed(row: Row, pace: float) -> float:
    """Sequences a second, where micro-batches take `pace` times as long as modelled."""
    sequences = row["gpus"] * row["micro_batch"] * row["accumulation"]
    return float(sequences / step_seconds(row, row["length"], row["accumulation"], pace))


def modelled_hours(row: Row, paces: Mapping[Key, float], factor: float = 1.0) -> float:
    """The hours of all phases and of their checkpoints; `factor` times the pace of the throughputs."""
    seconds = row["saves"] * SAVE_BYTES * count_parameters(row["model"]) / STORAGE
    for phase in row["phases"]:
        accumulation = phase["batch"] // (phase["micro_batch"] * row["gpus"])
        pace = factor * paces[row["run"], phase["length"]]
        step = step_seconds({**row, **phase}, phase["length"], accumulation, pace)
        seconds += phase["sequences"] / phase["batch"] * step
    return float(seconds) / 3600


def is_single(row: Row) -> bool:
    """Whether a row is of one node, or less."""
    return bool(row["gpus"] <= row["gpus_per_node"])


def fit_paces(rows: Sequence[Row]) -> dict[Key, float]:
    """How much longer than modelled micro-batches take, by the rows of one node alone, for every run and length."""
    alone = [row for row in rows if "accumulation" in row and is_single(row)]
    return {key: _fit_pace([row for row in alone if key_of(row) == key]) for key in dict.fromkeys(map(key_of, alone))}


def key_of(row: Row) -> Key:
    return row["run"], row["length"]


def _fit_pace(rows: Sequence[Row]) -> float:
    def excess(pace: float) -> float:
        return median(math.log(modelled_speed(row, pace) / row["sequences_per_second"]) for row in rows)

    low, high = 0.01, 100.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def compare(content: Mapping[str, Sequence[Row]]) -> Iterator[Comparison]:
    """Compares every published figure of several nodes with the model."""
    rows, paces = [row for row in content["rows"] if "accumulation" in row], fit_paces(content["rows"])
    nodes = {key_of(row): row for row in rows if row["gpus"] == row["gpus_per_node"]}
    for row in rows:
        if not is_single(row):
            node, gpus, speed = nodes[key_of(row)], row["gpus"], modelled_speed(row, paces[key_of(row)])
            linear = node["sequences_per_second"] * gpus / node["gpus"]
            what = f"sequences/s at {row['length']}"
            yield Comparison(row["run"], what, gpus, row["sequences_per_second"], speed, linear)
    hours = [row for row in content["hours"] if "phases" in row]
    single = {row["run"]: row for row in hours if is_single(row)}
    for row in hours:
        if not is_single(row):
            one = single[row["run"]]
            modelled = modelled_hours(row, paces, one["hours"] / modelled_hours(one, paces))
            linear = one["hours"] * one["gpus"] / row["gpus"]
            yield Comparison(row["run"], "hours", row["gpus"], row["hours"], modelled, linear)


def fit_margin(content: Mapping[str, Sequence[Row]]) -> tuple[float, float]:
    """What the fastest and the slowest published series took, as times of what a model says that was fitted without
    their source: how far the software of others differs."""
    times = foretell(content).values()
    return min(times), max(times)


def foretell(content: Mapping[str, Sequence[Row]]) -> dict[tuple[str, str], float]:
    """What every run took, at each length and in hours, as times of what the model says; the median of its rows.

    The share of the matrix throughput is fitted to the rows of all other sources.
    """
    rows, found = full_rows(content), defaultdict(list)
    for row in rows:
        found[row["run"], f"at {row['length']}"].append(times_modelled(row, rows))
    first = {row["run"]: row for row in reversed(rows)}
    for row in content["hours"]:
        if row.get("run") in first and "phases" in row:
            pace = pace_without(first[row["run"]]["source"], rows)
            paces = {(row["run"], phase["length"]): pace for phase in row["phases"]}
            found[row["run"], "in hours"].append(row["hours"] / modelled_hours(row, paces))
    return {series: median(times) for series, times in found.items()}


def cover(content: Mapping[str, Sequence[Row]]) -> dict[str, tuple[int, int]]:
    """How many rows of each source lie within the range that all other sources give, and how many there are."""
    rows, found = full_rows(content), {}
    for source in dict.fromkeys(row["source"] for row in rows):
        low, high = fit_margin({**content, "rows": [row for row in rows if row["source"] != source]})
        own = [times_modelled(row, rows) for row in rows if row["source"] == source]
        found[source] = sum(low <= times <= high for times in own), len(own)
    return found


def full_rows(content: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The throughputs of full sequences, whose batches are known: the model is asked about these."""
    return [row for row in content["rows"] if "accumulation" in row and row["padded"]]


def times_modelled(row: Row, rows: Sequence[Row]) -> float:
    """What a row took, as times of what the model says that is fitted to all `rows` of other sources."""
    return modelled_speed(row, pace_without(row["source"], rows)) / float(row["sequences_per_second"])


def pace_without(source: str, rows: Sequence[Row]) -> float:
    """How much longer than modelled micro-batches take, by the rows of all other sources."""
    return REACH / fit_reach([row for row in rows if row["source"] != source])


def fit_reach(rows: Sequence[Row]) -> float:
    """Share of the matrix throughput that products reach: the median of rows of one GPU with full sequences of 128."""
    found = []
    for row in rows:
        if row["gpus"] == 1 and row["length"] == 128 and row["padded"] and "held_out" not in row:
            gpu, work = GPUS[row["gpu"]], work_of(row, 128)
            seconds = work.sequences / row["sequences_per_second"] - work.traffic / (OF_DATASHEET * gpu.bandwidth)
            found.append(work.flops / seconds / gpu.products)
    return float(median(found))


def fit_slowest(rows: Sequence[Row]) -> float:
    """How ranks differ, as a standard deviation: the median of what a node loses against one of its GPUs."""
    found = []
    for one, node in product(rows, rows):
        same = all(one.get(key) == node.get(key) for key in ("run", "length"))
        is_node = node["gpus"] == node["gpus_per_node"]
        if same and "run" in one and "held_out" not in one and one["gpus"] == 1 and is_node:
            lost = node["gpus"] * one["sequences_per_second"] / node["sequences_per_second"] - 1
            found.append(lost / math.sqrt(2 * math.log(node["gpus"])))
    return float(median(found))


# Megatron-LM's figures of models that GPUs share

MESH_LENGTH, MESH_VOCABULARY, PER_NODE, MICRO_BATCH = 1024, 51_200, 16, 8
FIGURES = ("efficiency", "speedup", "flops", "seconds")
"""The published figures, of which a row has one."""


@dataclass(frozen=True)
class MeshComparison:
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
def make_mesh_shape(layers: int, hidden: int, heads: int) -> Shape:
    kind = find_architecture("gpt")
    given = {"layers": layers, "hidden": hidden, "heads": heads, "architecture": "gpt"}
    shape = kind.settings_type(**{**kind.defaults, **given}).shape(MESH_VOCABULARY)
    return shape.change_learning(objective="ltr", pairs=False, sees="before")


def count_mesh_flops(row: Row) -> float:
    """Counts the FLOPs of a step as the paper does."""
    shape = make_mesh_shape(row["layers"], row["hidden"], row["heads"]).change_learning(sees="both")
    return float(4 / 3 * row["batch"] * measure_sequences(shape, MESH_LENGTH, None).flops)


@lru_cache
def find_mesh_work(shape: Shape, tensor: int) -> tuple[MicroBatch, StepTraffic]:
    """Finds the work of a micro-batch on a rank, and what it exchanges in a step."""
    average = measure_sequences(shape.change_learning(sees="both"), MESH_LENGTH, None)
    work = MicroBatch.from_average(shape, "fp16", MICRO_BATCH, average, True, tensor, fused_attention=False)
    parameters, traffic = count_rank_parameters(shape, tensor), optimizers()["adamw"].traffic
    return work, StepTraffic(parameters, 0, 2, traffic, gradient_bytes=2, hides=False)


def time_mesh_step(row: Row, pace: float = 1.0) -> float:
    """A step where products and memory take `pace` times as long as modelled. Without ZeRO, gradients are joined in
    fp16 after the backward pass; attention keeps its probabilities; no kernel skips the pairs that nobody sees."""
    per_node = min(row["gpus"], PER_NODE)
    cluster = make_cluster(GPUS["v100-32"], "fp16", row["gpus"] // per_node, per_node, find_network("edr100x8"))
    work, exchange = find_mesh_work(make_mesh_shape(row["layers"], row["hidden"], row["heads"]), row["tensor"])
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
    return min(found, key=lambda software: find_mean_error(compare_meshes(fitted, software)))


def fit_pace(rows: Iterable[Row], fixed: float = 0.0) -> float:
    """Fits the pace to the row of one GPU."""
    one = find_one(rows)
    wanted, low, high = count_mesh_flops(one) / one["flops"] - fixed, 0.01, 10.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if time_mesh_step(one, middle) < wanted else (low, middle)
    return low


def find_mean_error(found: Iterable[MeshComparison]) -> float:
    return mean(abs(each.error) for each in found)


def find_one(rows: Iterable[Row]) -> Row:
    """Finds the row of one GPU."""
    [one] = [row for row in rows if row["gpus"] == 1]
    return one


def compare_meshes(rows: Sequence[Row], software: Software) -> Iterator[MeshComparison]:
    """Compares all rows but that of one GPU, to which the pace is fitted."""
    one = find_one(rows)
    for row in rows:
        if row is not one:
            [name] = {*FIGURES} & row.keys()
            work, own = count_mesh_flops(row), count_mesh_flops(one)
            scales = {"efficiency": work / row["gpus"] / one["flops"], "speedup": own / one["flops"], "flops": work}
            scale = scales.get(name, 0.0)
            seconds = software.fixed + time_mesh_step(row, software.pace)
            modelled = seconds if name == "seconds" else scale / seconds
            took = row["seconds"] if name == "seconds" else scale / row[name]
            yield MeshComparison(row, float(row[name]), modelled, took / time_mesh_step(row))
