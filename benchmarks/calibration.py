#!/usr/bin/env python3
"""Measures this machine for planner.py, and how far the planner's model is from what it measures.

    python benchmarks/calibration.py

Steps of a few models on one process with all threads and with one calibrate the model; other models and micro-batches,
and two processes that join their gradients, test it. Results go to benchmarks/results, for planner.py --calibration.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import itertools
import math
import os
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from pretraining.processes.environment import cores_are_idle, prepare_process

prepare_process()

import numpy as np
import torch
from rich.console import Console
from scipy.optimize import nnls

from benchmarks.contests import alternate
from benchmarks.measure import Keeper, results_file, run_command, when
from benchmarks.sides import Kind, Side, open_sides
from benchmarks.tables import matrix, show
from benchmarks.training_sides import Training, joined
from data_prep.common.capacity import num_cores
from data_prep.common.launchers import World, find_world
from pretraining.config.settings import VOCABULARY, Precision
from pretraining.data.batches import full_sequences
from pretraining.data.statistics import PREDICTED_SHARE, measure_sequences
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.shape import Shape
from pretraining.optimizers.declaration import optimizers
from pretraining.planning.cost import Cluster, Device, Exchange, MicroBatch, step_time
from pretraining.planning.memory import count_parameters
from pretraining.processes.group import connect
from pretraining.reporting.hardware import total_memory

CPU = torch.device("cpu")
DTYPE = name_dtype(choose_dtype("auto", CPU))
WARM_UP = 1


@dataclass(frozen=True)
class Case:
    """A step: of a model, on full sequences, in micro-batches."""

    size: str
    length: int
    micro_batch: int
    accumulation: int = 1

    @property
    def name(self) -> str:
        return f"{self.size}-{self.length}-{self.micro_batch}" + f"x{self.accumulation}" * (self.accumulation > 1)

    @property
    def shape(self) -> Shape:
        return Shape.named(self.size, VOCABULARY)


KNOWN = (
    Case("tiny", 128, 32), Case("mini", 128, 8), Case("mini", 128, 32), Case("mini", 512, 8), Case("small", 128, 16),
    Case("medium", 128, 8),
)  # fmt: skip
"""Steps that calibrate the model, on one process."""
BESIDE = KNOWN[:4]
"""Steps of two processes that join nothing, which tell how much they slow each other down."""
TESTED = (Case("mini", 128, 16), Case("small", 512, 4), Case("small", 128, 8, 2))
"""Steps that the model must foretell on one process; on two it must foretell all."""
JOINING = Case("medium", 8, 1)
"""A step that is hardly more than what ranks exchange, which gives the bytes a second between two."""


@dataclass(frozen=True)
class Calibration:
    """Measures this machine for the planner."""

    rounds: int = 5
    """Steps of each case that are measured, after one that warms up."""
    out: Path | None = None
    """File for what is found (default: in benchmarks/results, by the hardware)."""


def begin_training(shape: Shape, settings: EngineSettings, rank: int) -> Training:
    """Begins a training whose ranks exchange messages and share no memory, as the GPUs that are planned for."""
    with patch("pretraining.engine.gradients.find_neighbours", return_value=None):
        return Training(shape, settings, CPU, rank=rank)


class Rank:
    """A process that makes steps: alone, or as one of two ranks that join their gradients."""

    def __init__(self, rank: int, ranks: int, port: int, threads: int) -> None:
        torch.set_num_threads(threads)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.rank, self.ranks = rank, ranks
        connect(find_world(os.environ) if ranks > 1 else World(), CPU)
        torch.set_num_threads(threads)
        self.trainings: dict[str, Training] = {}

    def step(self, case: Case) -> None:
        """One step of a case."""
        if case.size not in self.trainings:
            settings = EngineSettings(precision=Precision(dtype=DTYPE))
            self.trainings[case.size] = begin_training(case.shape, settings, self.rank)
        batch = full_sequences(case.micro_batch, case.length, round(PREDICTED_SHARE * case.length))
        self.trainings[case.size].step(joined([batch] * case.accumulation, self.ranks))


def pair(threads: int = 1) -> dict[str, Kind]:
    """Two sides that are ranks of one run."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    return {f"rank {rank}": Kind(partial(Rank, rank, 2, port, threads)) for rank in range(2)}


def ask_together(sides: Sequence[Side], method: str, *given: Any) -> list[Any]:
    """Calls a method of several at the same time, and waits for all."""
    with ThreadPoolExecutor(len(sides)) as pool:
        return list(pool.map(lambda side: side.ask(method, *given), sides))


def measure_steps(cases: Sequence[Case], rounds: int, console: Console) -> dict[str, Any]:
    """Seconds of every case by who computes it: a process with all threads, one with one, two that join their gradients
    with one each, and two that do not, for some cases."""
    alone = {name: Kind(partial(Rank, 0, 1, 0, threads)) for name, threads in (("process", num_cores()), ("thread", 1))}
    found: dict[str, Any] = {}
    with open_sides({**alone, "beside": alone["thread"], **pair()}) as sides:
        ranks, apart = [sides["rank 0"], sides["rank 1"]], [sides["thread"], sides["beside"]]
        for case in cases:
            turns: dict[str, Callable[[], Any]] = {
                "process": partial(sides["process"].ask, "step", case),
                "thread": partial(sides["thread"].ask, "step", case),
                "ranks": partial(ask_together, ranks, "step", case),
            }
            if case in BESIDE:
                turns["apart"] = partial(ask_together, apart, "step", case)
            if not cores_are_idle():
                console.print("others compute on these cores: what follows is not of this machine alone")
            measured = alternate(turns, rounds, WARM_UP)
            found[case.name] = {side: measured.of(side) for side in turns}
            show(console, [matrix("", [{"seconds of": case.name, **found[case.name]}])])
    return found


def work_of(case: Case) -> MicroBatch:
    statistics = measure_sequences(case.shape, case.length, None)
    return MicroBatch.of(
        case.shape, DTYPE, case.micro_batch, statistics.pieces, statistics.flops, fused_attention=False
    )


def sharing_of(case: Case) -> Exchange:
    return Exchange.of(count_parameters(case.shape), 1, DTYPE, optimizers()["adamw"].traffic)


def fit(seconds: Mapping[Case, float]) -> Device:
    """Finds the speeds of a device from the seconds of steps: least squares of relative errors, nothing negative."""
    rows = []
    for case, taken in seconds.items():
        work, sharing = work_of(case), sharing_of(case)
        moved = case.accumulation * work.traffic + sharing.parameters * sharing.optimizer_bytes
        terms = [case.accumulation * work.flops, moved, case.accumulation * work.layers]
        rows.append([term / taken for term in terms])
    table = np.array(rows)
    scale = table.max(axis=0)
    product, byte, layer = nnls(table / scale, np.ones(len(rows)))[0] / scale
    return Device(1 / max(product, 1e-18), 1 / max(byte, 1e-15), layer, runs_ahead=False)


def foretell(found: Mapping[str, Any], cases: Sequence[Case]) -> tuple[dict[str, Device], float, list[dict[str, Any]]]:
    """Fits the model to single processes and compares it with the rest; returns devices, link and comparisons."""
    devices = {
        side: fit({case: found[case.name][side]["median"] for case in cases if case in KNOWN})
        for side in ("process", "thread")
    }
    beside = [found[case.name] for case in BESIDE]
    shared = statistics.median(each["apart"]["median"] / each["thread"]["median"] for each in beside)
    one = devices["thread"]
    slowed = replace(one, products=one.products / shared, bandwidth=one.bandwidth / shared, launch=shared * one.launch)
    clusters = {side: Cluster(device) for side, device in devices.items()}
    clusters["ranks"] = Cluster(slowed, 1, 2, link_of(found[JOINING.name]["ranks"]["median"], slowed))
    rows = []
    for case, (side, cluster) in itertools.product(cases, clusters.items()):
        measured, calibrates = found[case.name][side], case in KNOWN and side != "ranks"
        foretold = step_time(cluster, work_of(case), sharing_of(case), case.accumulation).total
        compared = {"foretold": round(foretold, 4), "error": round(foretold / measured["median"] - 1, 3)}
        rows.append({"case": case.name, "side": side, "calibrates": calibrates, "measured": measured, **compared})
    return {**devices, "ranks": slowed}, clusters["ranks"].link, rows


def link_of(seconds: float, device: Device) -> float:
    """The bytes a second between two ranks whose joining step takes so long: what is left of it, they exchange."""
    work, sharing = work_of(JOINING), sharing_of(JOINING)
    exchanged = step_time(Cluster(device, 1, 2, 1.0), work, sharing, 1).joining  # with one byte a second
    left = seconds - step_time(Cluster(device, 1, 2, math.inf), work, sharing, 1).total
    return exchanged / max(left, 1e-3 * seconds)


def run(settings: Calibration, console: Console) -> None:
    """Measures steps, and keeps what the model says of them."""
    out = settings.out or results_file("planner", with_gpu=False)
    keeper = Keeper("calibration", ["torch", "deepspeed"], out, with_gpu=False)
    found = measure_steps((*KNOWN, *TESTED, JOINING), settings.rounds, console)
    devices, link, rows = foretell(found, (*KNOWN, *TESTED))
    show(console, [matrix("foretold", [row for row in rows if not row["calibrates"]])])
    named = {side: asdict(device) for side, device in devices.items()}
    machine = {"dtype": DTYPE, "memory_bytes": total_memory(CPU), "link": link, "devices": named}
    console.print(f"kept in {keeper.keep({'steps': {**machine, 'rows': rows, **when()}})}")


if __name__ == "__main__":
    run_command(Calibration, run)
