#!/usr/bin/env python3
"""Measures how training steps scale: weakly, with a fixed number of sequences a process, and strongly, with a fixed
number in all.

    python benchmarks/scaling.py --parallel.tensor 2
    python benchmarks/scaling.py --recipe bert_large_lamb --parallel.zero 2 --data data/wiki
    sbatch --nodes=8 cluster/benchmark_scaling.slurm

Launches of 1, 2, 4 … processes, up to one for each GPU or each core, take turns, so that a disturbance affects all.
Each trains as train.py does, then again in a group without messages. The difference is the share of communication in a
step; the rest is due to shared cores and memory. Any value of the recipe can be given; with parallel.tensor, launches
without it take turns too. A process has 32 sequences of 128 pieces at a time, on a GPU 256, or as many as the recipe's
micro_batch; all together have 32, or 2,048. Under Slurm, a job makes the launches, with --notes, then the report.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import gc
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from pretraining.data.corpora import Corpora
from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.contests import Turns, alternate, spread
from benchmarks.measure import ResultsFile
from benchmarks.processes import launch
from benchmarks.tables import show, summarise_scaling
from benchmarks.texts import DEMO, make_demo
from benchmarks.training_sides import Training
from data_prep.common.capacity import num_cores
from data_prep.common.errors import UserError
from data_prep.common.flags import read_flags_and_rest
from data_prep.common.launchers import World, find_world
from data_prep.common.terminal import open_console, run_curable
from data_prep.shards import Manifest
from pretraining.config.overrides import load_recipe
from pretraining.config.settings import Phase, Recipe
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.batch import PretrainingBatches
from pretraining.processes import group
from pretraining.reporting.hardware import synchronize

WARM_UP, STEPS = 2, 6
"""Steps of a launch that do not count, and those of which the median is taken: to start the launch takes longer."""
LENGTH = 128
"""Sequences are as long as in the recipe's longest phase up to this, the paper's first."""
SEQUENCES = {"cpu": 32, "cuda": 256}
"""Sequences of a micro-batch: few on a CPU, so that a step takes seconds; many on a GPU, so that it does not wait."""
BATCHES = {"cpu": 32, "cuda": 2048}
"""Sequences of all processes in strong scaling; few processes accumulate them."""
SILENT = "seconds_without_communication"
"""The key of the seconds of a step in a group that sends no messages."""


@dataclass(frozen=True)
class Scaling:
    """Measures training steps of 1, 2, 4 … processes; values of the recipe can be given as --section.key VALUE."""

    recipe: Path | None = None
    """Recipe of the model, optimizer, precision and ZeRO stage (default: bert_mini, on GPUs bert_base_lamb)."""
    data: Path | None = None
    """Folder of shards (default: build/demo, made of the built-in corpus if it is missing)."""
    rounds: int = 3
    """Launches for each number of processes."""
    notes: Path | None = None
    """Run as a rank of one launch, for example by srun, and append the seconds to this file; with --out, report on the
    launches in it, and measure nothing."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results)."""


@dataclass(frozen=True)
class Note:
    """The results of one launch."""

    processes: int
    nodes: int
    threads: int
    """Threads of a process."""
    device: str
    dtype: str
    steps: Mapping[str, Mapping[str, float]]
    """Sequences of all processes, seconds, and seconds without communication if measured, by the kind of scaling."""
    tensor: int = 1
    """Processes that share a model."""

    @property
    def name(self) -> str:
        return f"{self.processes} × {self.threads}" + (f" / {self.tensor}" if self.tensor > 1 else "")


class RankSteps:
    """Steps of pre-training that one rank of a launch makes, on its part of the global batches, weak and strong."""

    def __init__(self, settings: Scaling, recipe: Recipe, world: World, device: torch.device) -> None:
        self.device, self.dtype = device, choose_dtype(recipe.precision.dtype, device)
        self._recipe, self._rank = recipe, world.rank
        shards = settings.data or DEMO
        manifest = Manifest.read(shards)
        self._shape = recipe.shape(manifest)
        tensor = recipe.parallel.tensor
        reader, readers = world.rank // tensor, world.size // tensor
        phase = find_phase(recipe)
        dataset = Dataset(Corpora.one(shards, manifest), phase.length, rank=reader, ranks=readers)
        order, steps = Order(recipe.seed, dataset.shard_rows), range(WARM_UP + STEPS)
        self.batches: dict[str, list[PretrainingBatches]] = {}
        """This rank's batches of all steps, by the kind of scaling."""
        for kind, (batch, accumulation) in choose_batches(phase, device, readers).items():
            read = partial(step_batches, dataset, BatchOrder(order, batch))
            self.batches[kind] = [read(step, reader, readers, readers * accumulation) for step in steps]

    def measure(self) -> dict[str, float]:
        """Makes all steps with a new engine, kinds in turns; returns the median seconds of a step of each kind."""
        recipe = self._recipe
        own = EngineSettings(recipe.optimizer, recipe.precision, recipe.parallel, recipe.compute, recipe.deepspeed)
        training = Training(self._shape, own, self.device, recipe.seed, self._rank)

        turns = {kind: partial(self._make_step, training, iter(batches)) for kind, batches in self.batches.items()}
        found = alternate(turns, len(self.batches["weak"]) - WARM_UP, WARM_UP)
        if not math.isfinite(float(training.engine.gradient_norm or 0.0)):
            raise UserError("the gradients are not finite, so that steps are not what they are in training")
        training.engine.close()
        del training, turns
        gc.collect()
        torch.cuda.empty_cache()
        return {kind: statistics.median(seconds) for kind, seconds in found.seconds.items()}

    def _make_step(self, training: Training, batches: Iterator[PretrainingBatches]) -> None:
        """Makes the next step, and waits for its end."""
        training.step(next(batches))
        synchronize(self.device)


def find_phase(recipe: Recipe) -> Phase:
    """Finds the phase with the longest sequences up to LENGTH; the first one if all are longer."""
    short = (phase for phase in recipe.phases if phase.length <= LENGTH)
    return max(short, key=lambda phase: phase.length, default=recipe.phases[0])


def choose_batches(phase: Phase, device: torch.device, processes: int) -> dict[str, tuple[int, int]]:
    """Returns the global batch and the micro-batches of a rank, for each kind of scaling, by the number of processes
    that read different data. Omits strong scaling if they do not divide its batch."""
    sequences, batch = SEQUENCES[device.type], BATCHES[device.type]
    if device.type == "cuda" and phase.micro_batch != "auto":
        sequences = phase.micro_batch  # a GPU may have room for fewer
    found = {"weak": (processes * sequences, 1)}
    accumulation = math.ceil(batch / processes / sequences)
    if batch % (processes * accumulation) == 0:
        found["strong"] = batch, accumulation
    return found


@contextmanager
def open_silent_group(world: World) -> Iterator[None]:
    """Opens a process group of the same size that sends no messages, so that this rank waits for no other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        # DeepSpeed needs the rank; the check that all ranks together hold all weights communicates.
        with patch.dict(os.environ, LOCAL_RANK=str(world.local_rank)), patch("pretraining.engine.partition._check"):
            yield
    finally:
        group.disconnect()


def take_part(settings: Scaling, recipe: Recipe, world: World) -> None:
    """Runs one rank of a launch; rank 0 appends the results of all."""
    assert settings.notes is not None
    device = group.choose_device("auto", world)
    group.connect(world, device, folder=settings.notes.parent)
    with group.shared_errors():
        if world.rank == 0 and settings.data is None:
            make_demo(print)
    torch.set_num_threads(recipe.compute.threads or group.default_threads(world))
    with group.shared_errors():
        work = RankSteps(settings, recipe, world, device)
    found = {"seconds": group.gather(work.measure())}
    store, _ = group.open_stores()
    group.disconnect()
    if world.size > 1 and recipe.parallel.zero < 3:  # ZeRO 3 needs messages for the weights
        with open_silent_group(world):
            store.set(f"silent/{world.rank}", json.dumps(work.measure()))
        if world.rank == 0:
            found[SILENT] = [json.loads(store.find(f"silent/{rank}", 600.0) or "") for rank in range(world.size)]
    if world.rank == 0:
        write_note(work, found, world, recipe.parallel.tensor, settings.notes)


def write_note(
    work: RankSteps, found: Mapping[str, Sequence[Mapping[str, float]]], world: World, tensor: int, path: Path
) -> None:
    """Appends the means over all ranks of a launch to the notes."""
    steps = {}
    for kind, batches in work.batches.items():
        means = {what: statistics.mean(rank[kind] for rank in ranks) for what, ranks in found.items()}
        steps[kind] = {"sequences": batches[0].sequences, **means}
    note = Note(
        processes=world.size,
        nodes=world.size // world.local_size,
        threads=torch.get_num_threads(),
        device=work.device.type,
        dtype=name_dtype(work.dtype),
        steps=steps,
        tensor=tensor,
    )
    with path.open("a") as file:
        file.write(json.dumps(vars(note)) + "\n")
    print(describe_launch(note), flush=True)


def measure_here(settings: Scaling, recipe: Recipe, overrides: list[str]) -> list[Note]:
    """Launches all numbers of processes on this machine, in turns."""
    here = torch.cuda.device_count() or num_cores()
    counts = sorted({*(1 << power for power in range(here.bit_length())), here})
    if settings.rounds < 1:
        raise UserError(f"--rounds {settings.rounds}: at least 1")
    shared = recipe.parallel.tensor
    if not any(count % shared == 0 for count in counts):
        raise UserError(f"parallel.tensor = {shared}: divides none of the numbers of processes, {counts}")
    threads = recipe.compute.threads or max(1, num_cores() // max(counts))
    launches = [(count, threads, tensor) for count in counts for tensor in sorted({1, shared}) if count % tensor == 0]
    if not torch.cuda.is_available() and not recipe.compute.threads and threads < num_cores():
        launches.append((1, num_cores(), 1))  # one process with the whole machine
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        path = Path(folder) / "notes.jsonl"
        given = {"--notes": path, "--recipe": settings.recipe, "--data": settings.data}
        words = [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
        for processes, each, tensor in launches * settings.rounds:
            own = ["--compute.threads", str(each), "--parallel.tensor", str(tensor)]
            launch(processes, __file__, *words, *overrides, *own)
        return read_notes(path)


def read_notes(path: Path) -> list[Note]:
    """Reads the launches in a file, in their order."""
    try:
        notes = [Note(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: no notes of scaling.py ({error})") from error
    if not notes:
        raise UserError(f"{path}: tells of no launch")
    return notes


def describe_launch(note: Note) -> str:
    """Describes a launch in one line."""
    where = f" on {note.nodes} nodes" if note.nodes > 1 else ""
    speeds = [f"{kind} {step['sequences'] / step['seconds']:,.1f} sequences/s" for kind, step in note.steps.items()]
    shared = f", sharing a model: {note.tensor}" if note.tensor > 1 else ""
    return f"processes{where}: {note.processes}{shared}, threads of each: {note.threads}; {', '.join(speeds)}"


def report(notes: Sequence[Note], described: Mapping[str, Any], out: Path | None, console: Console) -> None:
    """Prints and writes the results of all launches."""
    points = find_points(notes)
    found = {**described, "device": notes[0].device, "dtype": notes[0].dtype, "points": points}
    path = ResultsFile("scaling", ["torch", "deepspeed"], out).keep(found)
    show(console, summarise_scaling(found))
    console.print(f"kept in {path}", markup=False)


def find_points(notes: Sequence[Note]) -> list[dict[str, Any]]:
    """Returns, for each kind of scaling and number of processes, the speed, the efficiency against the fewest
    processes, and the share of communication in a step."""
    points = []
    for kind in ("weak", "strong"):
        launches = {note.name: note for note in notes if kind in note.steps}
        seconds: dict[str, list[float]] = {}
        for note in notes:
            for what, value in note.steps.get(kind, {}).items():
                seconds.setdefault(f"{note.name} {what}", []).append(value)
        rounds = min(map(len, seconds.values()), default=0)  # a job may end within a round
        turns = Turns({side: values[:rounds] for side, values in seconds.items()})
        base = min(launches.values(), key=lambda note: (note.processes, note.threads, note.tensor), default=None)
        points += [{"scaling": kind, **_point(turns, base, note, kind)} for note in launches.values() if base]
    return points


def _point(turns: Turns, base: Note, note: Note, kind: str) -> dict[str, Any]:
    sequences, side, silent = note.steps[kind]["sequences"], f"{note.name} seconds", f"{note.name} {SILENT}"
    work = (sequences / note.processes) / (base.steps[kind]["sequences"] / base.processes)

    ratio = turns.compute_ratio(f"{base.name} seconds", side)
    communication = 0.0 if note.processes == 1 else None
    if silent in turns.seconds:
        communication = round(1 - turns.compute_ratio(silent, side)["median"], 3)
    return {
        "processes": note.processes,
        "nodes": note.nodes,
        "threads": note.threads,
        "tensor": note.tensor,
        "sequences": int(sequences),
        "sequences_per_second": spread([sequences / seconds for seconds in turns.seconds[side]], 1),
        "efficiency": {name: round(value * work, 3) for name, value in ratio.items()},
        "communication": communication,
    }


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings, overrides = read_flags_and_rest(Scaling, arguments, "scaling.py", "measurements")
    name = settings.recipe or Path("bert_base_lamb" if torch.cuda.is_available() else "bert_mini")
    recipe = load_recipe(name, overrides)
    world, console = find_world(os.environ), open_console(soft_wrap=True)
    if settings.notes is not None and settings.out is None:
        take_part(settings, recipe, world)
        return 0
    if settings.notes is None and world.size > 1:
        raise UserError("--notes: is missing; without a launcher, scaling.py launches ranks by itself and needs none")
    notes = read_notes(settings.notes) if settings.notes else measure_here(settings, recipe, overrides)
    described = {"recipe": name.stem, "model": recipe.model.as_dict(), "optimizer": recipe.optimizer.name}
    lengths = {"zero": recipe.parallel.zero, "length": find_phase(recipe).length}
    report(notes, {**described, **lengths}, settings.out, console)
    return 0


if __name__ == "__main__":
    sys.exit(run_curable(lambda: main(sys.argv[1:])))
