"""A whole run: connects the ranks, begins or continues, trains, goes back if training diverges, exports the model."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from data_prep.common.errors import SharedError, UserError
from data_prep.common.files import replacing
from data_prep.common.launchers import World
from data_prep.common.locks import LOCK, locked
from pretraining.checkpoint.reading import list_fresh, restore_engine
from pretraining.checkpoint.record import RECIPE, TOKENIZER, list_finished
from pretraining.checkpoint.state import Saved
from pretraining.checkpoint.writing import require_room
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Parallel
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype
from pretraining.mesh.cuts import find_crossing
from pretraining.mesh.mesh import form_mesh
from pretraining.model.gpu_layouts import note_choice
from pretraining.objectives import declaration as objectives
from pretraining.planning.amount import warn_of_disproportion
from pretraining.processes import group
from pretraining.processes.context import Context
from pretraining.processes.ending import Ending
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch
from pretraining.training.branching import begin_branch
from pretraining.training.changes import continue_run, describe_jump, list_changes
from pretraining.training.finishing import finish_run
from pretraining.training.guards import CURE, LIMIT_CURE, LIMITED, DivergedError
from pretraining.training.origin import StartingPoint
from pretraining.training.request import Request
from pretraining.training.resuming import find_latest, find_starting_point, set_leaps_aside
from pretraining.training.skips import Skip, write_skips
from pretraining.training.trainer import Trainer

Device = Literal["auto", "cpu", "cuda"]
BUSY = "{owner} is training in this folder\nwait for its end, or name another folder"
LEAVE_SECONDS = 300.0
"""How long a requeued job waits for the ranks of its last start: a rank that lost the network notices it late."""


def run_training(
    wanted: Device, out: Path | None, read_request: Callable[[], Request], ending: Ending, console: Console
) -> None:
    """Trains the rest of a run, and exports it. The ranks connect and then read the request together: an error on one
    rank is raised on all."""
    world, failure, device = ending.world, None, torch.device("cpu")
    try:
        device = group.choose_device(wanted, world)
    except UserError as error:
        failure = error
    group.connect(world, device, folder=out)
    with contextlib.ExitStack() as stack:
        with group.shared_errors():
            request = read_request()
            if failure is not None:
                raise failure
        control = stack.enter_context(Control(world, request.time_limit))
        with group.shared_errors():
            watch = Watch(world, hang=request.recipe.guards.hang, run=request.out, device=device)
            require_one_request(request)
            require_mesh(request.recipe.parallel, world)
            if world.rank == 0:
                patience = LEAVE_SECONDS if "SLURM_RESTART_COUNT" in os.environ else 0.0  # Slurm sets it as it requeues
                stack.enter_context(locked(request.out / LOCK, f"--out {request.out}", BUSY, patience=patience))
            group.gather(None)  # wait for rank 0: only then the lock is that of this start
            ending.record_in(request.out)
            context = Context(world, device, console, control, watch)
            latest = find_latest(request, context)
            if latest is not None:
                request = continue_run(request, latest)
            elif request.branch is not None:
                request, latest = begin_branch(request, request.branch)
            trained = latest is not None and latest.run.state.phase >= len(request.recipe.phases)
            if not trained:
                require_room(request.out)
        with watch:
            is_done = trained or train_through(request, context, latest)
            if world.rank == 0 and is_done:
                with watch.pause():
                    finish_run(request, context, trained_now=not trained)
    group.disconnect()  # not after an error: it might wait for ever for ranks that are gone


def require_one_request(request: Request) -> None:
    """Raises an error on all ranks unless all were started with the same command and data."""
    group.agree({"recipe": request.recipe.as_dict(), "data": request.corpora.fingerprint}, "recipe and data")
    group.agree(request.stop_after, "--stop-after")
    group.agree(request.branch and request.branch.text, "--branch")
    group.agree(request.origin.identity if request.origin else None, f"the model {request.recipe.base_model}")


def require_mesh(parallel: Parallel, world: World) -> None:
    """Raises UserError unless ranks that share a model are on one machine, or may be on several."""
    if fault := find_crossing(parallel.tensor, world.local_size, parallel.across_nodes):
        raise UserError(fault)
    if parallel.tensor == 1 or parallel.across_nodes:
        return
    firsts = group.gather(world.rank - world.local_rank)  # equal on a machine whose ranks have consecutive numbers
    for first in range(0, world.size, parallel.tensor):
        last = first + parallel.tensor - 1
        if len({*firsts[first : last + 1]}) > 1:
            raise UserError(
                f"ranks {first} to {last} share a model, but are on several machines; number ranks machine by machine"
            )


def train_through(request: Request, context: Context, latest: Saved | None) -> bool:
    """Trains to the end; returns whether all phases are trained then. Goes on from the last checkpoint where a phase
    with another objective begins; if training diverges, returns to it and skips the batches concerned."""
    waiting: Callable[[str], Any] = nullcontext if context.world.rank else context.console.status
    mesh = form_mesh(request.recipe.parallel.tensor)  # once: groups of ranks keep memory of a GPU
    while True:
        with context.watch.pause(), group.shared_errors(), waiting("making the model"):
            start = find_starting_point(request, context, latest, mesh)
        with waiting("getting ready to train"):
            trainer = make_trainer(request, context, start)
        wrong = None
        try:
            trainer.train()
        except DivergedError as error:  # `error` refers to the whole trainer, and ends with this block
            wrong = error.skip
        is_done, goes_on = trainer.is_done, wrong is not None or trainer.learns_otherwise
        with context.watch.pause():
            if wrong is not None:
                trainer.saver.finish()
                set_leaps_aside(request, context, trainer.branch is None)
                leave_out(wrong, request, context, trainer)
            trainer.close()
            del trainer, start
            gc.collect()
            if not goes_on:
                return is_done
            request = replace(request, profile=0)  # it is there already
            latest = find_latest(request, context)


def leave_out(wrong: Skip, request: Request, context: Context, trainer: Trainer) -> None:
    """Notes the batches to skip; raises SharedError after too many rollbacks."""
    allowed, before = request.recipe.guards.rollbacks, len(trainer.skips)
    if before >= allowed:
        cure = LIMIT_CURE if wrong.reason.startswith(LIMITED) else CURE
        raise SharedError(
            f"{wrong.reason}\n{before} time{'s' * (before != 1)} before, the run has gone back to a checkpoint for "
            f"such a reason (guards.rollbacks = {allowed}); {cure}, and allow more rollbacks"
        )
    if context.world.rank == 0:
        write_skips(request.out, [*trainer.skips, wrong])
        back = "goes back to its last checkpoint" if list_finished(request.out) else "begins anew"
        context.warn(f"{wrong.reason}; the run {back} and leaves that out")


def make_trainer(request: Request, context: Context, start: StartingPoint) -> Trainer:
    """Makes a trainer at the starting point."""
    recipe = request.recipe
    settings = EngineSettings(recipe.optimizer, recipe.precision, recipe.parallel, recipe.compute, recipe.deepspeed)
    record = None if start.latest is None else start.latest.record
    fresh = set() if record is None else list_fresh(start.model, record.shape)
    late = {} if record is None else {**record.late_weights, **dict.fromkeys(fresh, record.optimizer_steps)}
    engine = Engine(start.model, settings, context.device, late)
    if start.latest is not None:
        restore_engine(start.latest.folder, engine, fresh)
    if context.world.rank == 0:
        write_run_folder(request)
        describe_run(request, context, engine, start.latest)
        if start.begins is not None:
            context.console.print(start.begins, markup=False, soft_wrap=True)
    return Trainer(request, context, engine, start)


def write_run_folder(request: Request) -> None:
    """Writes the recipe as it was understood, and the vocabulary, into the folder of a run."""
    with replacing(request.out / RECIPE) as file:
        file.write(request.recipe.as_toml().encode())
    for record in request.corpora.common.tables:
        if Path(record.path).suffix in (".txt", ".json"):
            with replacing(request.out / TOKENIZER / record.path) as file:
                file.write((request.corpora.folder / record.path).read_bytes())


def describe_run(request: Request, context: Context, engine: Engine, latest: Saved | None) -> None:
    """Prints the model, the ranks, the data, and the settings that changed since the checkpoint."""
    world, recipe, shape = context.world, request.recipe, engine.model.shape
    say = partial(context.console.print, markup=False, soft_wrap=True)
    count, threads = objectives.num_parameters(shape), torch.get_num_threads()
    say(
        f"{f'{count / 1e6:.1f}M' if count >= 1e6 else f'{count:,}'} parameters: {shape.layers} layers of "
        f"{shape.hidden}, {shape.vocabulary:,} pieces; {recipe.optimizer.name}, {name_dtype(engine.dtype)}, "
        f"ZeRO {engine.zero}"
    )
    where = f"{world.size} rank{'s' * (world.size > 1)} on {context.device.type}"
    where += f", {engine.mesh.tensor_ranks} to a model" if engine.mesh.tensor_ranks > 1 else ""
    each = f"{threads} thread{'s' * (threads > 1)} each ({world.launcher})"
    say(f"{where}, {each}; data {request.corpora}, run {request.out}")
    settings = recipe.objective.model_copy(update={"name": shape.learns.objective})
    for note in objectives.configure_objective(settings).list_notes(shape):
        say(note)
    steps = [schedule.steps for schedule in build_schedules(recipe)]
    if latest is None and (warning := warn_of_disproportion(recipe, request.corpora, steps)):
        context.warn(warning)
    states = torch.empty(1, shape.hidden, dtype=engine.dtype, device=context.device)
    longest = max(phase.length for phase in recipe.phases)
    if note := note_choice(states, shape.heads, longest, shape.attention_dropout):
        say(note)
    if latest is not None:
        branch, step = latest.run.branch, latest.record.step
        is_begin = branch is not None and branch.step == step
        say(f"goes on as a branch of {branch}" if is_begin else f"continues after step {step:,}")
        if engine.same_bits and latest.run.same_bits is None:
            say(f"the bits are the same on any number of ranks from step {step:,} on, not before (parallel.same_bits)")
        for change in list_changes(latest, request, context, engine):
            say(f"changed since then: {change}")
        if jump := describe_jump(latest, recipe):
            say(jump)
