"""How a run begins or goes on: what is in its folder already, whether that fits, and a trainer that stands there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.shards import Manifest
from pretraining.checkpoint.reading import (
    TOKENIZER,
    Progress,
    find_checkpoint,
    finished,
    load_weights,
    newest_whole,
    read_record,
    read_weights,
    restore,
)
from pretraining.config.settings import Recipe
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype
from pretraining.huggingface.folders import CONFIG, read_folder
from pretraining.model import cpu_kernels as kernels
from pretraining.model.bert import Bert
from pretraining.model.shape import Shape
from pretraining.processes.group import default_threads, gather
from pretraining.processes.launchers import World
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch
from pretraining.training.guards import Skip, read_skips
from pretraining.training.trainer import Job, Trainer


@dataclass(frozen=True)
class Start:
    """All that a trainer is made of, now or again."""

    job: Job
    init: Path | None
    """weights to begin with"""
    resume: Literal["auto", "never"]
    world: World
    device: torch.device
    console: Console
    control: Control
    watch: Watch

    def warn(self, message: str) -> None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"warning: {message}", markup=False)


@contextlib.contextmanager
def alone_in(run: Path) -> Iterator[None]:
    """Keeps a second run out of the folder, for as long as this process lives."""
    path = run / "lock"
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise UserError(f"--run {run}: cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise UserError(
                f"--run {run}: {owner} is training in this folder\nwait for its end, or name another folder"
            ) from None
        except OSError:
            pass  # a file system without locks, as Lustre is where it is mounted so
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError as error:
            raise UserError(f"--run {run}: cannot be written: {error.strerror}") from error
        yield


@dataclass(frozen=True)
class Beginning:
    """Where a run begins or goes on."""

    model: Bert
    latest: Path | None
    """the checkpoint that the model's weights are from"""
    skips: list[Skip]


def find_beginning(start: Start) -> Beginning:
    """Looks into the run's folder; all that may fail on one rank alone, before ranks need one another to compute."""
    job, recipe = start.job, start.job.recipe
    torch.set_num_threads(recipe.compute.threads or default_threads(start.world))
    kernels.allow(recipe.compute.kernels == "auto" and not recipe.compute.compile)
    latest = find_latest(start)
    model = Bert(job.shape, recipe.compute.checkpoint_activations).initialize(recipe.seed)
    if latest is not None:
        model.load_state_dict(read_weights(latest, job.shape))
    elif start.init is not None:
        start_with(model, start.init, job.manifest)
    return Beginning(model, latest, gather(read_skips(job.run))[0])


def make_trainer(start: Start, beginning: Beginning) -> Trainer:
    """A trainer that stands there."""
    job, latest = start.job, beginning.latest
    engine = Engine(beginning.model, job.recipe, start.device, start.world.size)
    record = None if latest is None else read_record(latest)
    progress = Progress() if latest is None else restore(latest, engine)
    if start.world.rank == 0:
        write_run_folder(job)
        describe(start, engine, record)
    trainer = Trainer(job, engine, progress, start.console, beginning.skips, start.control, start.watch.mark)
    if record is not None:
        trainer.restore(record)
    return trainer


def find_latest(start: Start) -> Path | None:
    """The checkpoint to go on from; None for a new run. Refuses what does not belong together."""
    job = start.job
    if finished(job.run) and start.resume == "never":
        raise UserError(f"--run {job.run}: has checkpoints; name a new folder, or leave out --resume never")
    latest = newest_whole(job.run, start.warn)
    if latest is None:
        return None
    record = read_record(latest)
    before, here = record["data"]["fingerprint"], job.manifest.fingerprint
    if before != here and not job.recipe.data.allow_other:
        raise UserError(
            f"--data {job.data}: {job.run} was trained on other data (fingerprint {before[:12]}, here {here[:12]}); "
            "give that folder, or allow it: --data.allow_other true"
        )
    for what, then, now in what_must_stay(record, job):
        raise UserError(f"--run {job.run}: was trained with {what} {then}, and this is {now}; name a new folder")
    return latest


def what_must_stay(record: dict[str, Any], job: Job) -> Iterator[tuple[str, Any, Any]]:
    """What a checkpoint cannot be continued with: the name, what it was, and what it is now."""
    try:
        recipe, before = job.recipe, Recipe.model_validate(record["recipe"])
    except ValidationError as error:
        raise UserError(f"--run {job.run}: was trained by another version of this program: {error}") from error
    progress = Progress(**record["progress"])
    phase = progress.phase
    then_shape, shape = (
        replace(each, dropout=0.0, attention_dropout=0.0) for each in (Shape(**record["shape"]), job.shape)
    )
    settings: list[tuple[str, Any, Any]] = [
        ("the model", then_shape, shape),
        ("optimizer.name", before.optimizer.name, recipe.optimizer.name),
        ("the phases", [each.name for each in before.phases], [each.name for each in recipe.phases]),
    ]
    if progress.phase_step and phase < len(recipe.phases):  # in the middle of a phase, the order of the data stays
        settings.append(("seed", before.seed, recipe.seed))
        for name in ("length", "batch"):
            then, now = (getattr(each.phases[phase], name) for each in (before, recipe))
            settings.append((f"phases.{phase}.{name}", then, now))
    return (each for each in settings if each[1] != each[2])


def what_has_changed(record: dict[str, Any], start: Start, engine: Engine) -> list[str]:
    """What is otherwise than in the checkpoint, and may be."""
    made_by = record["made_by"]
    here = {"ranks": start.world.size, "parallel.zero": engine.zero, "precision.dtype": name_dtype(engine.dtype)}
    changes = [f"{name} {made_by[name]} -> {now}" for name, now in here.items() if made_by[name] != now]
    then, now = (dict(flattened(each)) for each in (record["recipe"], start.job.recipe.as_dict()))
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name) and name not in here:
            changes.append(f"{name} {then.get(name, 'not set')} -> {now.get(name, 'not set')}")
    return changes


def flattened(table: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables and lists of tables, by their dotted names."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        table = dict(enumerate(table))
    if not isinstance(table, dict):
        yield above, table
        return
    for name, value in table.items():
        yield from flattened(value, f"{above}.{name}" if above else str(name))


def start_with(model: Bert, source: Path, manifest: Manifest) -> None:
    """Gives a new model the weights of a run, a checkpoint or a transformers folder."""
    if (source / CONFIG).exists():
        shape, weights, missing = read_folder(source)
    else:
        (shape, weights, record), missing = load_weights(find_checkpoint(source)), ()
        if record["data"]["vocabulary"] != manifest.content["vocabulary"]["sha256"]:
            raise UserError(f"--init {source}: was trained with another vocabulary than that of the data")
    if replace(shape, dropout=model.shape.dropout, attention_dropout=model.shape.attention_dropout) != model.shape:
        raise UserError(f"--init {source}: its model is {shape}; the recipe and the data want {model.shape}")
    left = model.load_state_dict(weights, strict=False)
    assert set(left.missing_keys) == set(missing)
    assert not left.unexpected_keys


def write_run_folder(job: Job) -> None:
    """What a run folder says before there is a checkpoint: the recipe as it was understood, and the vocabulary."""
    with replacing(job.run / "recipe.toml") as file:
        file.write(job.recipe.as_toml().encode())
    for record in job.manifest.tables():
        if Path(record.path).suffix in (".txt", ".json"):
            with replacing(job.run / TOKENIZER / record.path) as file:
                file.write((job.data / record.path).read_bytes())


def describe(start: Start, engine: Engine, record: dict[str, Any] | None) -> None:
    """What is about to happen, in a few lines."""
    job, ranks, console = start.job, start.world, start.console
    shape = job.shape
    count = shape.num_parameters()
    console.print(
        f"{f'{count / 1e6:.1f}M' if count >= 1e6 else f'{count:,}'} parameters: {shape.layers} layers of "
        f"{shape.hidden}, {shape.vocabulary:,} pieces; {job.recipe.optimizer.name}, "
        f"{name_dtype(engine.dtype)}, ZeRO {engine.zero}"
    )
    where = f"{ranks.size} rank{'s' * (ranks.size > 1)} on {start.device.type}"
    threads = torch.get_num_threads()
    console.print(
        f"{where}, {threads} thread{'s' * (threads > 1)} each ({ranks.launcher}); data {job.data}, run {job.run}",
        markup=False,
        soft_wrap=True,
    )
    if record is not None:
        console.print(f"continues after step {record['progress']['step']:,}", markup=False)
        for change in what_has_changed(record, start, engine):
            console.print(f"changed since then: {change}", markup=False, soft_wrap=True)
