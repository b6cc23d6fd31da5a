"""How a run begins or goes on: what is in its folder already, whether that fits, and a trainer that stands there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.vocabulary.source import read_vocabulary
from pretraining.checkpoint.reading import newest_whole, parameter_sizes, read_weights, restore_engine
from pretraining.checkpoint.record import (
    TOKENIZER,
    CheckpointRecord,
    finished_checkpoints,
    read_record,
)
from pretraining.config.settings import Recipe
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype, set_arithmetic
from pretraining.model.bert import Bert
from pretraining.processes.group import default_threads, gather
from pretraining.training.guards import Skip, read_skips
from pretraining.training.micro_batch import MicroBatches
from pretraining.training.origin import begin_with
from pretraining.training.request import Context, Request
from pretraining.training.state import RunRecord, RunState
from pretraining.training.trainer import Trainer


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins or goes on."""

    model: Bert
    state: RunState
    """where it stands, and what the model's weights were trained on before"""
    checkpoint: Path | None
    """the checkpoint that the model's weights are from; None for a new run"""
    skips: list[Skip]
    begins: str | None = None
    """one line on the model that a new run begins with; None where its weights are drawn"""


def find_starting_point(request: Request, context: Context) -> StartingPoint:
    """Looks into the run's folder and makes the model: all that may fail on one rank, before ranks need one another."""
    compute = request.recipe.compute
    torch.set_num_threads(compute.threads or default_threads(context.world))
    set_arithmetic(request.recipe.precision, compute, context.device)
    checkpoint = find_latest(request, context)
    model = Bert(request.shape, compute.checkpoint_activations).initialize(request.recipe.seed)
    state = RunState(trained_segments=2 if request.shape.next_sentence else 1)
    begins = None
    if checkpoint is not None:
        model.load_state_dict(read_weights(checkpoint, parameter_sizes(request.shape)))
        state = RunRecord.of(read_record(checkpoint)).state
    elif request.origin is not None:
        begins = begin_with(model, state, request.origin, read_vocabulary(request.data))
    return StartingPoint(model, state, checkpoint, gather(read_skips(request.out))[0], begins)


def make_trainer(request: Request, context: Context, start: StartingPoint) -> Trainer:
    """Makes a trainer that stands at the starting point."""
    recipe = request.recipe
    settings = EngineSettings(recipe.optimizer, recipe.precision, recipe.parallel, recipe.compute, recipe.deepspeed)
    engine = Engine(start.model, settings, context.device)
    record = None if start.checkpoint is None else read_record(start.checkpoint)
    if start.checkpoint is not None:
        restore_engine(start.checkpoint, engine)
    if context.world.rank == 0:
        write_run_folder(request)
        describe(request, context, engine, record)
        if start.begins is not None:
            context.console.print(start.begins, markup=False, soft_wrap=True)
    run = None if record is None else RunRecord.of(record)
    state = start.state
    micro_batches = MicroBatches(request, context, engine, {} if run is None else run.micro_batches)
    micro_batches.find(state.phase)
    trainer = Trainer(request, context, engine, state, start.skips, micro_batches)
    if record is not None:
        trainer.restore(record)
    return trainer


def find_latest(request: Request, context: Context) -> Path | None:
    """Finds the checkpoint to go on from; None for a new run. Refuses what does not belong together."""
    out = request.out
    if finished_checkpoints(out) and request.resume == "never":
        raise UserError(f"--out {out}: has checkpoints; name a new folder, or leave out --resume never")
    checkpoint = newest_whole(out, context.warn)
    if checkpoint is None:
        return None
    record = read_record(checkpoint)
    before, here = RunRecord.of(record).data.fingerprint, request.manifest.fingerprint
    if before != here and not request.recipe.data.allow_other:
        raise UserError(
            f"--data {request.data}: {out} was trained on other data (fingerprint {before[:12]}, here {here[:12]}); "
            "give that folder, or allow it: --data.allow_other true"
        )
    for what, then, now in what_must_stay(record, request):
        raise UserError(f"--out {out}: was trained with {what} {then}, and this is {now}; name a new folder")
    return checkpoint


def what_must_stay(record: CheckpointRecord, request: Request) -> Iterator[tuple[str, Any, Any]]:
    """Lists what a checkpoint cannot be continued with: the name, what it was, and what it is now."""
    run = RunRecord.of(record)
    try:
        recipe, before = request.recipe, Recipe.model_validate(run.recipe)
    except ValidationError as error:
        raise UserError(f"--out {request.out}: was trained by another version of this program: {error}") from error
    phase = run.state.phase
    then_shape, shape = (replace(shape, dropout=0.0, attention_dropout=0.0) for shape in (record.shape, request.shape))
    settings: list[tuple[str, Any, Any]] = [
        ("the model", then_shape, shape),
        ("optimizer.name", before.optimizer.name, recipe.optimizer.name),
        ("the phases", [phase.name for phase in before.phases], [phase.name for phase in recipe.phases]),
    ]
    if run.state.phase_step and phase < len(recipe.phases):  # in the middle of a phase, the order of the data stays
        settings.append(("seed", before.seed, recipe.seed))
        for name in ("length", "batch"):
            then, now = (getattr(either.phases[phase], name) for either in (before, recipe))
            settings.append((f"phases.{phase}.{name}", then, now))
    return ((what, then, now) for what, then, now in settings if then != now)


def what_has_changed(record: CheckpointRecord, request: Request, context: Context, engine: Engine) -> list[str]:
    """Lists what is otherwise than in the checkpoint, and may be."""
    made_by = record.made_by
    changes = {
        "ranks": (made_by.ranks, context.world.size),
        "parallel.zero": (made_by.zero, engine.zero),
        "precision.dtype": (made_by.dtype, name_dtype(engine.dtype)),
    }
    then, now = (dict(flattened(recipe)) for recipe in (RunRecord.of(record).recipe, request.recipe.as_dict()))
    for name in sorted(then.keys() | now.keys()):
        changes.setdefault(name, (then.get(name, "not set"), now.get(name, "not set")))
    return [f"{name} {before} -> {here}" for name, (before, here) in changes.items() if before != here]


def flattened(table: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables and lists of tables, by their dotted names."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        table = dict(enumerate(table))
    if not isinstance(table, dict):
        yield above, table
        return
    for name, value in table.items():
        yield from flattened(value, f"{above}.{name}" if above else str(name))


def write_run_folder(request: Request) -> None:
    """Writes what a run folder holds before there is a checkpoint: the recipe as it was understood, the vocabulary."""
    with replacing(request.out / "recipe.toml") as file:
        file.write(request.recipe.as_toml().encode())
    for record in request.manifest.tables():
        if Path(record.path).suffix in (".txt", ".json"):
            with replacing(request.out / TOKENIZER / record.path) as file:
                file.write((request.data / record.path).read_bytes())


def describe(request: Request, context: Context, engine: Engine, record: CheckpointRecord | None) -> None:
    """Prints what is about to happen, in a few lines."""
    world, console, shape = context.world, context.console, request.shape
    count, threads = shape.num_parameters(), torch.get_num_threads()
    console.print(
        f"{f'{count / 1e6:.1f}M' if count >= 1e6 else f'{count:,}'} parameters: {shape.layers} layers of "
        f"{shape.hidden}, {shape.vocabulary:,} pieces; {request.recipe.optimizer.name}, "
        f"{name_dtype(engine.dtype)}, ZeRO {engine.zero}"
    )
    where = f"{world.size} rank{'s' * (world.size > 1)} on {context.device.type}"
    console.print(
        f"{where}, {threads} thread{'s' * (threads > 1)} each ({world.launcher}); data {request.data}, "
        f"run {request.out}",
        markup=False,
        soft_wrap=True,
    )
    if not shape.next_sentence:
        console.print("the data has no pairs: the model learns from masked pieces alone", markup=False)
    if record is not None:
        console.print(f"continues after step {record.step:,}", markup=False)
        for change in what_has_changed(record, request, context, engine):
            console.print(f"changed since then: {change}", markup=False, soft_wrap=True)
