#!/usr/bin/env python3
"""Measures how training steps scale: weakly, with a fixed number of sequences a process, and strongly, with a fixed
number in all.

    python benchmarks/scaling.py --processes 1 2 --tensor 1 2
    python benchmarks/scaling.py --recipe bert_large_lamb --parallel.zero 2 --data data/wiki
    sbatch --nodes=8 cluster/benchmark_scaling.slurm

Launches of 1, 2, 4 … processes take turns, so that a disturbance affects all. Each trains as train.py does, then again
in a group without messages. The difference is the share of communication in a step; the rest is due to shared cores and
memory. Any value of the recipe can be given. Under Slurm, a job makes the launches, with --notes, then the report.
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
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal
from unittest.mock import patch

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.contests import alternate
from benchmarks.measure import read_recipe_command
from benchmarks.scaling_report import SILENT, Note, describe_launch, read_notes, report
from benchmarks.texts import DEMO, make_demo
from benchmarks.training_sides import Training
from data_prep.common.capacity import num_cores
from data_prep.common.errors import UserError
from data_prep.common.launchers import World, find_world
from data_prep.common.terminal import open_console, run_curable
from data_prep.shards import Manifest
from pretraining.config.overrides import load_recipe
from pretraining.config.settings import Recipe
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.batch import PretrainingBatches
from pretraining.processes import group
from pretraining.reporting.hardware import synchronize

WARM_UP = 2


@dataclass(frozen=True)
class Scaling:
    """Measures training steps of 1, 2, 4 … processes; values of the recipe can be given as --section.key VALUE."""

    processes: tuple[int, ...] = ()
    """Numbers of processes (default: 1, 2, 4 … up to one for each GPU, or for each core)."""
    tensor: tuple[int, ...] = (1,)
    """Numbers of processes that share a model (`parallel.tensor`), each measured where it divides the processes."""
    recipe: Path | None = None
    """Recipe of the model, optimizer, precision and ZeRO stage (default: bert_mini, on GPUs bert_base_lamb)."""
    data: Path | None = None
    """Folder of shards (default: build/demo, made of the built-in corpus if it is missing)."""
    length: int = 128
    """Length of the sequences."""
    sequences: int | None = None
    """Sequences of a micro-batch (default: 32, on GPUs 256)."""
    batch: int | None = None
    """Sequences of all processes in strong scaling; few processes accumulate them (default: 32, on GPUs 2,048)."""
    steps: int = 6
    """Steps of each launch of which the median is taken, after two that warm up."""
    rounds: int = 3
    """Launches for each number of processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: GPUs if there are any."""
    notes: Path | None = None
    """Run as a rank of one launch, for example by srun, and append the seconds to this file."""
    report: bool = False
    """Report on the launches in --notes, and measure nothing."""
    out: Path | None = None
    """File for the results; the plot goes beside it (default: in benchmarks/results)."""


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
        dataset = Dataset(shards, manifest, settings.length, rank=reader, ranks=readers)
        order, steps = Order(recipe.seed, dataset.shard_rows), range(WARM_UP + settings.steps)
        self.batches: dict[str, list[PretrainingBatches]] = {}
        """This rank's batches of all steps, by the kind of scaling."""
        for kind, (batch, accumulation) in choose_batches(settings, device, readers).items():
            read = partial(step_batches, dataset, BatchOrder(order, batch))
            self.batches[kind] = [read(step, reader, readers, accumulation) for step in steps]

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


def choose_batches(settings: Scaling, device: torch.device, processes: int) -> dict[str, tuple[int, int]]:
    """Returns the global batch and the micro-batches of a rank, for each kind of scaling, by the number of processes
    that read different data. Omits strong scaling if they do not divide its batch."""
    on_gpu = device.type == "cuda"
    sequences = settings.sequences or (256 if on_gpu else 32)
    batch = settings.batch or (2048 if on_gpu else 32)
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
    device = group.choose_device(settings.device, world)
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


def measure_here(settings: Scaling, recipe: Recipe, arguments: list[str], console: Console) -> list[Note]:
    """Launches all numbers of processes on this machine, in turns."""
    here = torch.cuda.device_count() if torch.cuda.is_available() and settings.device != "cpu" else num_cores()
    counts = sorted({*(settings.processes or (*(1 << power for power in range(here.bit_length())), here))})
    for name, number in (
        ("processes", min(counts)),
        ("tensor", min(settings.tensor)),
        ("rounds", settings.rounds),
        ("steps", settings.steps),
    ):
        if number < 1:
            raise UserError(f"--{name} {number}: at least 1 is needed")
    if recipe.parallel.tensor not in (1, *settings.tensor):
        raise UserError(f"parallel.tensor = {recipe.parallel.tensor}: give --tensor {recipe.parallel.tensor}")
    if settings.data is not None:
        Manifest.read(settings.data)  # fails before anything is launched
    most = max(counts)
    device = group.choose_device(settings.device, World(0, most, 0, most))
    threads = recipe.compute.threads or max(1, num_cores() // most)
    check_tensor(settings, counts, console)
    launches = [(count, threads, tensor) for count in counts for tensor in settings.tensor if count % tensor == 0]
    if device.type == "cpu":
        if most > num_cores():
            console.print(f"{most} processes share {num_cores()} cores: steps also wait for their turns there")
        if not recipe.compute.threads and threads < num_cores():
            launches.append((1, num_cores(), 1))  # one process with the whole machine
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        path = Path(folder) / "notes.jsonl"
        for processes, each, tensor in launches * settings.rounds:
            own = ["--notes", str(path), "--compute.threads", str(each), "--parallel.tensor", str(tensor)]
            launch(processes, [*arguments, *own])
        return read_notes(path)


def check_tensor(settings: Scaling, counts: Sequence[int], console: Console) -> None:
    """Prints which --tensor divides none of the numbers of processes. Raises UserError if the user gave these numbers,
    or if no other --tensor is left."""
    useless = [tensor for tensor in settings.tensor if all(count % tensor for count in counts)]
    if useless:
        fault = f"--tensor {useless[0]}: divides none of the numbers of processes, {' '.join(map(str, counts))}"
        if settings.processes or useless == [*settings.tensor]:
            raise UserError(fault)
        console.print(f"{fault}; left out", markup=False)


def launch(processes: int, arguments: list[str]) -> None:
    """Starts ranks on this machine, and waits for them. Raises UserError with their message if they fail."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*torchrun, __file__, *arguments], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines()
        told = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
        if told is None:
            print(done.stderr, file=sys.stderr)
        what = "see above" if told is None else lines[told].removeprefix("error: ")
        raise UserError(f"a launch of {processes} processes has failed: {what}")


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings, overrides = read_recipe_command(Scaling, arguments)
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    name = settings.recipe or Path("bert_base_lamb" if on_gpu else "bert_mini")
    recipe = load_recipe(name, overrides)
    world, console = find_world(os.environ), open_console(soft_wrap=True)
    if settings.notes is not None and not settings.report:
        take_part(settings, recipe, world)
        return 0
    if settings.notes is None and (settings.report or world.size > 1):
        raise UserError("--notes: is missing; without a launcher, scaling.py launches ranks by itself and needs none")
    notes = read_notes(settings.notes) if settings.notes else measure_here(settings, recipe, arguments, console)
    described = {"recipe": name.stem, "model": recipe.model.as_dict(), "optimizer": recipe.optimizer.name}
    lengths = {"zero": recipe.parallel.zero, "length": settings.length}
    report(notes, {**described, **lengths}, settings.out, console)
    return 0


if __name__ == "__main__":
    sys.exit(run_curable(lambda: main(sys.argv[1:])))
