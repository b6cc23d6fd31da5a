#!/usr/bin/env python3
"""Measures this machine for planner.py, and how far the planner's model is from what it measures.

    python benchmarks/calibration.py

Steps of a few models on one process with all threads and with one calibrate the model; other models and micro-batches,
and two processes that join their gradients, test it. What ranks hold of weights, gradients and the optimizer's state is
compared too, for four sizes under all ZeRO stages. Results go to benchmarks/results, for planner.py --calibration.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretraining.processes.environment import prepare_process

prepare_process()

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from benchmarks.measure import alternate, mistakes_told, record, results_file, write_results
from benchmarks.sides import Kind, open_sides
from data_prep.common.workers import num_cores
from pretraining.config.settings import Precision
from pretraining.data.batches import full_sequences
from pretraining.data.statistics import PREDICTED_SHARE, measure_sequences
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import choose_dtype, name_dtype, set_arithmetic
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import PretrainingBatches
from pretraining.model.bert import Bert, pretraining_loss
from pretraining.model.shape import Shape
from pretraining.planning.cost import OF_DATASHEET, Cluster, Device, MicroBatch, Sharing, step_time
from pretraining.planning.memory import count_parameters
from pretraining.planning.plan import VOCABULARY
from pretraining.processes.group import connect
from pretraining.processes.launchers import World, find_world
from pretraining.reporting.hardware import total_memory

CPU = torch.device("cpu")
JOINED = 1 << 24
"""Elements that are joined to measure what ranks exchange in a second."""
WARM_UP = 2


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
    Case("tiny", 128, 32), Case("mini", 128, 32), Case("mini", 512, 8), Case("small", 128, 16), Case("medium", 128, 8),
)  # fmt: skip
"""what calibrates"""
TESTED = (Case("mini", 128, 8), Case("small", 512, 4), Case("small", 128, 8, 2), Case("medium", 128, 16))
"""what the model must foretell, on one process; and on two, with what calibrates"""
BASE = (Case("base", 128, 8),)


@dataclass(frozen=True)
class Calibration:
    """Measures this machine for the planner."""

    rounds: int = 5
    """Steps of each case that count."""
    large: bool = True
    """Foretell a step of base too."""
    out: Path | None = None
    """File for what is found (default: in benchmarks/results, by the hardware)."""


class Rank:
    """A process that makes steps: alone, or as one of two ranks that join their gradients."""

    def __init__(self, rank: int, ranks: int, port: int, threads: int) -> None:
        torch.set_num_threads(threads)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.rank, self.ranks, self.steps = rank, ranks, 0
        connect(find_world(os.environ) if ranks > 1 else World(), CPU)
        torch.set_num_threads(threads)
        self.engines: dict[str, Engine] = {}

    def __call__(self, question: Any) -> None:
        if isinstance(question, Case):
            self.step(question)
        else:
            dist.all_reduce(torch.ones(question))

    def step(self, case: Case) -> None:
        """One step of a case."""
        if case.size not in self.engines:
            precision = Precision(dtype=name_dtype(choose_dtype("auto", CPU)))
            settings = EngineSettings(precision=precision)
            set_arithmetic(precision, settings.compute, CPU)
            self.engines[case.size] = Engine(Bert(case.shape).initialize(0), settings, CPU)
        predicted = round(PREDICTED_SHARE * case.length)
        batch = full_sequences(case.micro_batch, case.length, predicted)
        sequences = self.ranks * case.accumulation * case.micro_batch
        batches = PretrainingBatches((batch,) * case.accumulation, sequences, sequences * predicted)
        train_step(self.engines[case.size], batches, 1e-5, Seeds.of(0, self.steps, self.rank), pretraining_loss)
        self.steps += 1


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(cases: Sequence[Case], rounds: int, console: Console) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of every case by who computes it: a process with all threads, one with one, two that join with one each,
    and two that do not."""
    cores, port = num_cores(), free_port()
    kinds = {"process": Kind(partial(Rank, 0, 1, 0, cores)), "thread": Kind(partial(Rank, 0, 1, 0, 1))}
    kinds["beside"] = kinds["thread"]
    kinds |= {f"rank {rank}": Kind(partial(Rank, rank, 2, port, 1)) for rank in range(2)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    with open_sides(kinds) as sides, ThreadPoolExecutor(2) as pool:

        def together(names: Sequence[str], question: Any) -> None:
            list(pool.map(lambda name: sides[name].ask(question), names))

        ranks = [name for name in kinds if name.startswith("rank")]
        for question in (JOINED, *cases):
            turns: dict[str, Callable[[], Any]] = {"ranks": partial(together, ranks, question)}
            if isinstance(question, Case):
                turns |= {name: partial(sides[name].ask, question) for name in ("process", "thread")}
                turns["apart"] = partial(together, ["thread", "beside"], question)
            measured = alternate(turns, rounds, WARM_UP)
            name = question.name if isinstance(question, Case) else "joining"
            found[name] = {side: measured.of(side) for side in turns}
            console.print(f"{name}: " + ", ".join(f"{side} {one['median']:.3f} s" for side, one in found[name].items()))
    return found


def work_of(case: Case) -> MicroBatch:
    statistics = measure_sequences(case.shape, case.length, None)
    dtype = name_dtype(choose_dtype("auto", CPU))
    return MicroBatch.of(
        case.shape, dtype, case.micro_batch, statistics.pieces, statistics.flops, fused_attention=False
    )


def sharing_of(case: Case) -> Sharing:
    return Sharing.of(count_parameters(case.shape), 1, name_dtype(choose_dtype("auto", CPU)), "adamw")


def fit(seconds: Mapping[Case, float]) -> Device:
    """The device whose steps take about so long: least squares of the relative errors, with nothing negative."""
    rows = []
    for case, taken in seconds.items():
        work, sharing = work_of(case), sharing_of(case)
        moved = case.accumulation * work.traffic + sharing.parameters * sharing.optimizer_bytes
        terms = [case.accumulation * work.flops, moved, case.accumulation * work.layers, case.accumulation]
        rows.append([term / taken for term in terms])
    matrix = np.array(rows)
    scale = matrix.max(axis=0)
    product, byte, layer, start = nnls(matrix / scale, np.ones(len(rows)))[0] / scale
    return Device(1 / max(product, 1e-18), 1 / max(byte, 1e-15), layer, start, runs_ahead=False)


def foretell(found: Mapping[str, Any], cases: Sequence[Case]) -> tuple[dict[str, Device], float, list[dict[str, Any]]]:
    """Fits to single processes, and compares what the model says of the rest; with bytes a second between two ranks."""
    devices = {
        side: fit({case: found[case.name][side]["median"] for case in cases if case in KNOWN})
        for side in ("process", "thread")
    }
    link = 4 * JOINED / (OF_DATASHEET * found["joining"]["ranks"]["median"])
    shared = float(
        np.median([found[case.name]["apart"]["median"] / found[case.name]["thread"]["median"] for case in KNOWN])
    )
    slowed = Device(
        *(rate / shared for rate in (devices["thread"].products, devices["thread"].bandwidth)),
        *(shared * seconds for seconds in (devices["thread"].launch, devices["thread"].start)),
        runs_ahead=False,
    )
    clusters = {side: Cluster(device) for side, device in devices.items()}
    clusters["ranks"] = Cluster(slowed, 1, 2, link)
    rows = []
    for case in cases:
        for side, cluster in clusters.items():
            measured = found[case.name][side]
            foretold = step_time(cluster, work_of(case), sharing_of(case), case.accumulation).total
            rows.append(
                {
                    "case": case.name,
                    "side": side,
                    "calibrates": case in KNOWN and side != "ranks",
                    "measured": measured,
                    "foretold": round(foretold, 4),
                    "error": round(foretold / measured["median"] - 1, 3),
                }
            )
    return {**devices, "ranks": slowed}, link, rows


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Calibration, args=arguments, prog="calibration.py", config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    cases = (*KNOWN, *TESTED, *(BASE if settings.large else ()))
    found = measure(cases, settings.rounds, console)
    devices, link, rows = foretell(found, cases)
    results = {
        "dtype": name_dtype(choose_dtype("auto", CPU)),
        "memory_bytes": total_memory(CPU),
        "link": link,
        "devices": {side: asdict(device) for side, device in devices.items()},
        "steps": rows,
    }
    table = Table("step", "by", "seconds", "foretold", "error", box=None)
    for row in rows:
        if not row["calibrates"]:
            error = f"{100 * row['error']:+.1f}%"
            table.add_row(row["case"], row["side"], f"{row['measured']['median']:.3f}", f"{row['foretold']:.3f}", error)
    console.print(table)
    path = write_results(
        settings.out or results_file("planner"), record("calibration", ["torch", "deepspeed"], results)
    )
    console.print(f"kept in {path}")
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
