"""How a run begins or goes on: what is in its folder already, whether that fits, and a trainer that stands there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

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
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype, set_arithmetic
from pretraining.model.bert import Bert
from pretraining.processes.group import default_threads, gather
from pretraining.training.changes import is_trained, require_continuation, what_has_changed, with_what_is_kept
from pretraining.training.guards import Skip, read_skips
from pretraining.training.micro_batch import MicroBatches
from pretraining.training.origin import begin_with
from pretraining.training.request import Context, Request
from pretraining.training.state import RunRecord, RunState
from pretraining.training.trainer import Trainer


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins or goes on."""

    request: Request
    """what the command asks for, with what a run keeps of its first start"""
    model: Bert
    state: RunState
    """where it stands, and what the model's weights were trained on before"""
    checkpoint: Path | None
    """the checkpoint that the model's weights are from; None for a new run"""
    skips: list[Skip]
    begins: str | None = None
    """one line on the model that a new run begins with; None where its weights are drawn"""


def find_starting_point(request: Request, context: Context) -> StartingPoint | None:
    """Looks into the run's folder and makes the model: all that may fail on one rank, before ranks need one another.

    None where the run is trained to its end, so that nothing in its folder is to be written.
    """
    compute = request.recipe.compute
    torch.set_num_threads(compute.threads or default_threads(context.world))
    set_arithmetic(request.recipe.precision, compute, context.device)
    checkpoint = find_latest(request, context)
    run = None if checkpoint is None else RunRecord.of(read_record(checkpoint))
    if checkpoint is not None and run is not None:
        request = replace(request, recipe=with_what_is_kept(request.recipe, run))
        require_continuation(read_record(checkpoint), request)
        if is_trained(run):
            return None
    model = Bert(request.shape, compute.checkpoint_activations).initialize(request.recipe.seed)
    state = RunState(trained_segments=2 if request.shape.next_sentence else 1)
    begins = None
    if checkpoint is not None and run is not None:
        model.load_state_dict(read_weights(checkpoint, parameter_sizes(request.shape)))
        state = run.state
    elif request.origin is not None:
        begins = begin_with(model, state, request.origin, read_vocabulary(request.data))
    return StartingPoint(request, model, state, checkpoint, gather(read_skips(request.out))[0], begins)


def make_trainer(context: Context, start: StartingPoint) -> Trainer:
    """Makes a trainer that stands at the starting point."""
    request, recipe = start.request, start.request.recipe
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
    run = RunRecord.of(read_record(checkpoint))
    before, here = run.data.fingerprint, request.manifest.fingerprint
    if before != here and not request.recipe.data.allow_other and not is_trained(run):
        raise UserError(
            f"--data {request.data}: {out} was trained on other data (fingerprint {before[:12]}, here {here[:12]}); "
            "give that folder, or allow it: --data.allow_other true"
        )
    return checkpoint


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
