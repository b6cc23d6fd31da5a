#!/usr/bin/env python3
"""Pre-trains an encoder on shards.

    python pretraining/train.py --recipe pretraining/recipes/bert_mini.toml --data data/wiki --run runs/mini
    torchrun --nproc-per-node 2 -- pretraining/train.py --recipe … --data … --run …
    deepspeed --num_gpus 2 pretraining/train.py --recipe … --data … --run …

and likewise under srun and mpirun. (Without the `--`, torchrun takes our --run for one of its own options.)

Any value of the recipe can be given anew: `--phases.0.steps 100 --parallel.zero 2`. `--check` prints what the run will
be, without training. The same command continues a run that was stopped.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from pretraining.processes.environment import prepare_process

prepare_process()

import torch
import tyro
from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.shards import Manifest
from pretraining.checkpoint.exporting import export
from pretraining.config.overrides import load_recipe_and_data
from pretraining.config.settings import Recipe
from pretraining.engine.precision import DTYPES, choose_dtype, name_dtype
from pretraining.planning.plan import build_plan
from pretraining.planning.table import render_plan
from pretraining.processes.ending import Ending, exit_now
from pretraining.processes.group import SharedError, agree, choose_device, connect, disconnect, shared_errors
from pretraining.processes.launchers import World, find_world, missing_tasks
from pretraining.processes.stopping import Control, time_limit
from pretraining.processes.watchdog import Watch
from pretraining.reporting.hardware import matrix_rate
from pretraining.training.guards import CURE, DivergedError, Skip, write_skips
from pretraining.training.resume import Beginning, Start, alone_in, find_beginning, make_trainer
from pretraining.training.trainer import Job, Trainer

EXPORT = "export"


@dataclass(frozen=True)
class Train:
    """Pre-trains an encoder; every value of the recipe can be given as --section.key VALUE."""

    recipe: Path
    """TOML file that says how to train."""
    data: Path | None = None
    """Folder of shards, made by shard.py."""
    run: Path | None = None
    """Folder of the run: checkpoints, metrics, the exported model."""
    init: Path | None = None
    """Start with the weights of this run, checkpoint or transformers folder."""
    stop_after: str | None = None
    """Stop after the phase of this name; the same command without it goes on."""
    resume: Literal["auto", "never"] = "auto"
    """Whether to continue what is in the run folder."""
    time_limit: str = "auto"
    """Save and stop ahead of this, counted from the start: 90m, 2h, 1-12:00:00 (default: the end of the Slurm job)."""
    check: bool = False
    """Print what the run will be, and stop."""
    ranks: int | None = None
    """With --check: the ranks to plan for (default: those it is started with)."""
    pieces_per_second: float | None = None
    """With --check: the throughput of all ranks, for the hours (default: from the measured matrix rate)."""


def main(arguments: list[str]) -> int:
    """Returns the exit code; `Code` says what it means."""
    arguments = [each for each in arguments if not re.fullmatch(r"--local[_-]rank=\d+", each)]  # deepspeed adds it
    wanted, overrides = tyro.cli(
        Train, args=arguments, prog="train.py", return_unknown_args=True, config=(tyro.conf.FlagCreatePairsOff,)
    )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with Ending() as ending:
        ending.world = world = find_world(os.environ)
        if wanted.check:
            check(wanted, overrides, world, console)
        else:
            if tasks := missing_tasks(os.environ, world):
                warning = f"Slurm reserved {tasks} tasks, and this is one process alone: srun is missing"
                print(f"warning: {warning}", file=sys.stderr)
            train(wanted, overrides, ending, console)
    return ending.code


def check(wanted: Train, overrides: list[str], ranks: World, console: Console) -> None:
    """Prints the plan of the run."""
    if ranks.rank:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    planned = wanted.ranks or ranks.size
    recipe, manifest = load_recipe_and_data(wanted.recipe, overrides, wanted.data, ranks=planned)
    dtype, measured = recipe.precision.dtype, recipe.logging.peak_flops
    if dtype == "auto":
        dtype = name_dtype(choose_dtype(dtype, device))
    will_run_here = recipe.parallel.device in ("auto", device.type) and not (dtype == "fp16" and device.type == "cpu")
    if will_run_here and measured is None and wanted.pieces_per_second is None:
        measured = matrix_rate(device, DTYPES[dtype])
    plan = build_plan(
        recipe,
        ranks=planned,
        dtype=dtype,
        manifest=manifest,
        pieces_per_second=wanted.pieces_per_second,
        flops_per_second=measured,
    )
    console.print(render_plan(plan))


def train(wanted: Train, overrides: list[str], ending: Ending, console: Console) -> None:
    """Trains what is left of the run, and exports it."""
    world, failure, device, limit = ending.world, None, torch.device("cpu"), None
    try:
        limit = time_limit(wanted.time_limit)
        recipe, manifest = load(wanted, overrides, world)
        device = choose_device(recipe.parallel.device, world)
    except UserError as error:
        failure = error  # raised when all ranks can hear it
    connect(world, device)
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(Control(limit))
        with shared_errors():
            if failure is not None:
                raise failure
            job = job_of(wanted, recipe, manifest)
            watch = Watch(world, hang=recipe.guards.hang, run=job.run)
            agree({"recipe": recipe.as_dict(), "data": manifest.fingerprint}, "recipe and data")
            agree([str(wanted.init), wanted.stop_after], "--init and --stop-after")
            if world.rank == 0:
                stack.enter_context(alone_in(job.run))
            ending.record_in(job.run)
            start = Start(job, wanted.init, wanted.resume, world, device, console, control, watch)
            beginning = find_beginning(start)
        with watch:
            trainer = train_through(start, beginning)
            if world.rank == 0 and trainer.finished:
                with watch.pause():
                    finish(job.run, console)
    disconnect()  # only now: after an error it may wait for ever for ranks that are gone


def job_of(wanted: Train, recipe: Recipe, manifest: Manifest) -> Job:
    """What the command asks for."""
    assert wanted.data is not None
    assert wanted.run is not None
    return Job(recipe, wanted.data, manifest, wanted.run, wanted.stop_after)


def train_through(start: Start, beginning: Beginning) -> Trainer:
    """Trains to the end; where it goes wrong, from the last checkpoint on, without the batches that did it."""
    while True:
        trainer = make_trainer(start, beginning)
        wrong = what_goes_wrong(trainer)
        if wrong is None:
            return trainer
        with start.watch.pause():
            leave_out(wrong, start, trainer)
            trainer.close()
            del trainer, beginning
            gc.collect()
            beginning = find_beginning(replace(start, resume="auto"))  # the checkpoints are this run's own


def what_goes_wrong(trainer: Trainer) -> Skip | None:
    """Trains; what to leave out, if it comes to that. (An exception would keep all that it came through alive.)"""
    try:
        trainer.train()
    except DivergedError as error:
        return error.skip
    return None


def leave_out(wrong: Skip, start: Start, trainer: Trainer) -> None:
    """Notes it, for this process and those that come after; an error if there was enough of it."""
    allowed, before = start.job.recipe.guards.rollbacks, len(trainer.skips)
    if before >= allowed:
        raise SharedError(
            f"{wrong.reason}\n{before} times before, the run has gone back to a checkpoint for such a reason "
            f"(guards.rollbacks = {allowed}); {CURE}"
        )
    if start.world.rank == 0:
        write_skips(start.job.run, [*trainer.skips, wrong])
        start.warn(f"{wrong.reason}; the run goes back to its last checkpoint and leaves that out")
    trainer.saver.finish()


def finish(run: Path, console: Console) -> None:
    """Exports the trained model, and says what it is good for."""
    folder = run / EXPORT
    console.print(str(export(run, folder)), markup=False, soft_wrap=True)
    call = f'transformers.AutoModelForMaskedLM.from_pretrained("{folder}")'
    console.print(f"load it: {call}", markup=False, soft_wrap=True)


def load(wanted: Train, overrides: list[str], ranks: World) -> tuple[Recipe, Manifest]:
    """The recipe and what is known of the data; every fault of them and of the command at once."""
    faults = [f"--{name}: is missing" for name in ("data", "run") if getattr(wanted, name) is None]
    found = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        recipe, manifest = load_recipe_and_data(
            wanted.recipe, overrides, wanted.data, ranks=ranks.size, device=cast(Literal["cpu", "cuda"], found)
        )
    except UserError as error:
        raise UserError("\n".join([*faults, str(error)])) from None
    names = [phase.name for phase in recipe.phases]
    if wanted.stop_after not in (None, *names):
        faults.append(f"--stop-after {wanted.stop_after}: no phase of this name; there is {', '.join(names)}")
    if faults or manifest is None:
        raise UserError("\n".join(faults))
    return recipe, manifest


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
