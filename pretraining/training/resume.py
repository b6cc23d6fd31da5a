"""Begins or continues a run: finds its last checkpoint, builds the model and the trainer."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path

import torch

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import replacing
from data_prep.vocabulary.source import read_vocabulary
from pretraining.checkpoint.reading import find_newest_whole, restore_engine, restore_model
from pretraining.checkpoint.record import RECIPE, TOKENIZER, list_finished
from pretraining.checkpoint.state import RunState, Saved
from pretraining.checkpoint.writing import find_free_name
from pretraining.config.schedule import build_schedules
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype, set_arithmetic
from pretraining.huggingface.weights import check_finite
from pretraining.objectives.declaration import build_model, configure_objective, num_parameters
from pretraining.planning.amount import warn_of_disproportion
from pretraining.processes.context import Context
from pretraining.processes.cores import keep_near
from pretraining.processes.group import default_threads, gather, shared_errors
from pretraining.training.changes import list_changes
from pretraining.training.origin import StartingPoint, begin_with
from pretraining.training.request import Request
from pretraining.training.skips import Skip, read_skips
from pretraining.training.trainer import Trainer


def find_starting_point(request: Request, context: Context, latest: Saved | None) -> StartingPoint:
    """Builds the model: all that may fail on one rank alone, before any collective operation."""
    compute = request.recipe.compute
    threads = compute.threads or default_threads(context.world)
    torch.set_num_threads(threads)
    if context.device.type == "cuda":
        keep_near(context.device, threads)
    set_arithmetic(request.recipe.precision, compute, context.device)
    model = build_model(request.shape, compute.checkpoint_activations).initialize(request.recipe.seed)
    state = RunState(trained_segments=2 if request.manifest.has_pairs else 1)
    begins = None
    if latest is not None:
        restore_model(latest.folder, model)
        check_finite(str(latest.folder), model.state_dict())
        state = latest.run.state
    elif request.origin is not None:
        begins = begin_with(model, state, request.origin, read_vocabulary(request.data))
    skips = [Skip(*skip) for skip in gather([astuple(skip) for skip in read_skips(request.out)])[0]]
    return StartingPoint(model, state, latest, skips, begins)


def make_trainer(request: Request, context: Context, start: StartingPoint) -> Trainer:
    """Makes a trainer at the starting point."""
    recipe = request.recipe
    settings = EngineSettings(recipe.optimizer, recipe.precision, recipe.parallel, recipe.compute, recipe.deepspeed)
    engine = Engine(start.model, settings, context.device)
    if start.latest is not None:
        restore_engine(start.latest.folder, engine)
    if context.world.rank == 0:
        write_run_folder(request)
        describe_run(request, context, engine, start.latest)
        if start.begins is not None:
            context.console.print(start.begins, markup=False, soft_wrap=True)
    return Trainer(request, context, engine, start)


def find_latest(request: Request, context: Context) -> Saved | None:
    """Finds the checkpoint to continue from; None for a new run."""
    out = request.out
    if list_finished(out) and request.resume == "never":
        raise UserError(f"--out {out}: has checkpoints; name a new folder, or leave out --resume never")
    checkpoint = find_newest_whole(out, context.warn)
    return None if checkpoint is None else Saved.read(checkpoint)


def set_leaps_aside(request: Request, context: Context) -> None:
    """Renames the newest checkpoints that were saved after the loss had leapt, so that no run continues from them. All
    ranks call it together. If the run cannot begin anew without its base model, the first checkpoint is kept."""
    can_begin = request.origin is not None or request.recipe.base_model is None
    there = list_finished(request.out) if context.world.rank == 0 else []
    with shared_errors():
        for checkpoint in reversed(there if can_begin else there[1:]):
            with suppress(DamageError):
                if (leapt := Saved.read(checkpoint).run.leapt) is None:
                    break
                aside = find_free_name(checkpoint)
                try:
                    shutil.move(checkpoint, aside)
                except OSError as error:
                    raise UserError(f"{checkpoint}: cannot be moved to {aside.name}: {error}") from error
                context.warn(f"{aside}: saved when the loss had leapt to {leapt:.3g}: no run goes on from it")


def write_run_folder(request: Request) -> None:
    """Writes the recipe as it was understood, and the vocabulary, into the folder of a run."""
    with replacing(request.out / RECIPE) as file:
        file.write(request.recipe.as_toml().encode())
    for record in request.manifest.tables:
        if Path(record.path).suffix in (".txt", ".json"):
            with replacing(request.out / TOKENIZER / record.path) as file:
                file.write((request.data / record.path).read_bytes())


def describe_run(request: Request, context: Context, engine: Engine, latest: Saved | None) -> None:
    """Prints the model, the ranks, the data, and the settings that changed since the checkpoint."""
    world, recipe, shape = context.world, request.recipe, request.shape
    say = partial(context.console.print, markup=False, soft_wrap=True)
    count, threads = num_parameters(shape), torch.get_num_threads()
    say(
        f"{f'{count / 1e6:.1f}M' if count >= 1e6 else f'{count:,}'} parameters: {shape.layers} layers of "
        f"{shape.hidden}, {shape.vocabulary:,} pieces; {recipe.optimizer.name}, {name_dtype(engine.dtype)}, "
        f"ZeRO {engine.zero}"
    )
    where = f"{world.size} rank{'s' * (world.size > 1)} on {context.device.type}"
    each = f"{threads} thread{'s' * (threads > 1)} each ({world.launcher})"
    say(f"{where}, {each}; data {request.data}, run {request.out}")
    if note := configure_objective(recipe.objective).note(shape):
        say(note)
    steps = [schedule.steps for schedule in build_schedules(recipe)]
    if latest is None and (warning := warn_of_disproportion(recipe, request.manifest, steps)):
        context.warn(warning)
    if recipe.compute.compile:
        say("the first step compiles the layers, which takes minutes")
    if latest is not None:
        say(f"continues after step {latest.record.step:,}")
        for change in list_changes(latest, request, context, engine):
            say(f"changed since then: {change}")
