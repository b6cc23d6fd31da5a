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

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

from pretraining.process import prepare_process

prepare_process()

import torch
import tyro
from rich.console import Console

from data_prep.errors import UserError
from data_prep.files import replacing
from data_prep.shards import Manifest
from pretraining import kernels
from pretraining.checkpoint import TOKENIZER, Progress, find_checkpoint, finished, load_weights, read_record, restore
from pretraining.engine import DTYPES, Engine, choose_dtype, name_dtype
from pretraining.export import export
from pretraining.interchange import CONFIG, read_folder
from pretraining.metrics import matrix_rate
from pretraining.model import Bert
from pretraining.plan import build_plan, load_recipe_and_data, render_plan
from pretraining.ranks import (
    INTERRUPTED,
    Ranks,
    Watch,
    agree,
    choose_device,
    connect,
    default_threads,
    disconnect,
    find_ranks,
    leave,
    missing_tasks,
    speaks,
    together,
)
from pretraining.recipe import Recipe
from pretraining.shape import Shape
from pretraining.trainer import Job, Trainer

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
    check: bool = False
    """Print what the run will be, and stop."""
    ranks: int | None = None
    """With --check: the ranks to plan for (default: those it is started with)."""
    pieces_per_second: float | None = None
    """With --check: the throughput of all ranks, for the hours (default: from the measured matrix rate)."""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 a mistake of ours, 2 something that the user can cure, 130 interrupted."""
    arguments = [each for each in arguments if not re.fullmatch(r"--local[_-]rank=\d+", each)]  # deepspeed adds it
    wanted, overrides = tyro.cli(
        Train, args=arguments, prog="train.py", return_unknown_args=True, config=(tyro.conf.FlagCreatePairsOff,)
    )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    ranks = Ranks()
    try:
        ranks = find_ranks(os.environ)
        if wanted.check:
            check(wanted, overrides, ranks, console)
        else:
            if tasks := missing_tasks(os.environ, ranks):
                errors.print(f"warning: Slurm reserved {tasks} tasks, and this is one process alone: srun is missing")
            train(wanted, overrides, ranks, console)
    except UserError as error:
        if speaks(ranks, error):
            errors.print(f"error: {error}", markup=False, style="red" if errors.is_terminal else "")
        return 2
    except KeyboardInterrupt:
        if ranks.rank == 0:
            errors.print(f"\n{INTERRUPTED}")
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the work in good order, once: launchers send their signals again and again."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def check(wanted: Train, overrides: list[str], ranks: Ranks, console: Console) -> None:
    """Prints the plan of the run."""
    if ranks.rank:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    planned = wanted.ranks or ranks.ranks
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


def train(wanted: Train, overrides: list[str], ranks: Ranks, console: Console) -> None:
    """Trains what is left of the run, and exports it."""
    failure, device = None, torch.device("cpu")
    try:
        recipe, manifest = load(wanted, overrides, ranks)
        device = choose_device(recipe.parallel.device, ranks)
    except UserError as error:
        failure = error  # raised when all ranks can hear it
    connect(ranks, device)
    try:
        with together():
            if failure is not None:
                raise failure
            trainer = prepare(wanted, recipe, manifest, ranks, device, console)
        with Watch(ranks):
            trainer.train()
            if ranks.rank == 0 and trainer.finished:
                finish(trainer.job.run, console)
    finally:
        disconnect()


def finish(run: Path, console: Console) -> None:
    """Exports the trained model, and says what it is good for."""
    folder = run / EXPORT
    console.print(str(export(run, folder)), markup=False, soft_wrap=True)
    call = f'transformers.AutoModelForMaskedLM.from_pretrained("{folder}")'
    console.print(f"load it: {call}", markup=False, soft_wrap=True)


def load(wanted: Train, overrides: list[str], ranks: Ranks) -> tuple[Recipe, Manifest]:
    """The recipe and what is known of the data; every fault of them and of the command at once."""
    faults = [f"--{name}: is missing" for name in ("data", "run") if getattr(wanted, name) is None]
    found = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        recipe, manifest = load_recipe_and_data(
            wanted.recipe, overrides, wanted.data, ranks=ranks.ranks, device=cast(Literal["cpu", "cuda"], found)
        )
    except UserError as error:
        raise UserError("\n".join([*faults, str(error)])) from None
    names = [phase.name for phase in recipe.phases]
    if wanted.stop_after not in (None, *names):
        faults.append(f"--stop-after {wanted.stop_after}: no phase of this name; there is {', '.join(names)}")
    if faults or manifest is None:
        raise UserError("\n".join(faults))
    return recipe, manifest


def prepare(
    wanted: Train, recipe: Recipe, manifest: Manifest, ranks: Ranks, device: torch.device, console: Console
) -> Trainer:
    """A trainer that stands where the run is to go on."""
    assert wanted.data is not None
    assert wanted.run is not None
    agree({"recipe": recipe.as_dict(), "data": manifest.fingerprint}, "recipe and data")
    torch.set_num_threads(recipe.compute.threads or default_threads(ranks))
    kernels.allow(recipe.compute.kernels == "auto" and not recipe.compute.compile)
    job = Job(recipe, wanted.data, manifest, wanted.run, wanted.stop_after)
    latest = find_latest(job, wanted.resume)
    agree([latest and latest.name, str(wanted.init), wanted.stop_after], "--run, --init and --stop-after")
    model = Bert(job.shape, recipe.compute.checkpoint_activations).initialize(recipe.seed)
    if latest is None and wanted.init is not None:
        start_with(model, wanted.init, manifest)
    engine = Engine(model, recipe, device, ranks.ranks)
    progress = Progress() if latest is None else restore(latest, engine)
    if ranks.rank == 0:
        write_run_folder(job)
        describe(job, ranks, device, engine, progress, console)
    return Trainer(job, engine, progress, console)


def find_latest(job: Job, resume: str) -> Path | None:
    """The checkpoint to go on from; None for a new run. Refuses what does not belong together."""
    there = finished(job.run)
    if not there:
        return None
    if resume == "never":
        raise UserError(f"--run {job.run}: has checkpoints; name a new folder, or leave out --resume never")
    record = read_record(there[-1])
    before, here = record["data"]["fingerprint"], job.manifest.fingerprint
    if before != here and not job.recipe.data.allow_other:
        raise UserError(
            f"--data {job.data}: {job.run} was trained on other data (fingerprint {before[:12]}, here {here[:12]}); "
            "give that folder, or allow it: --data.allow_other true"
        )
    for what, then, now in changes(record, job):
        raise UserError(f"--run {job.run}: was trained with {what} {then}, and this is {now}; name a new folder")
    return there[-1]


def changes(record: dict[str, Any], job: Job) -> Iterator[tuple[str, Any, Any]]:
    """What a checkpoint cannot be continued with: the name, what it was, and what it is now."""
    recipe, before = job.recipe, Recipe.model_validate(record["recipe"])
    progress = Progress(**record["progress"])
    phase = progress.phase
    settings: list[tuple[str, Any, Any]] = [
        ("the model", Shape(**record["shape"]), job.shape),
        ("optimizer.name", before.optimizer.name, recipe.optimizer.name),
        ("the phases", [each.name for each in before.phases], [each.name for each in recipe.phases]),
    ]
    if progress.phase_step and phase < len(recipe.phases):  # in the middle of a phase, the order of the data stays
        settings.append(("seed", before.seed, recipe.seed))
        for name in ("length", "batch"):
            then, now = (getattr(each.phases[phase], name) for each in (before, recipe))
            settings.append((f"phases.{phase}.{name}", then, now))
    return (each for each in settings if each[1] != each[2])


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


def describe(
    job: Job, ranks: Ranks, device: torch.device, engine: Engine, progress: Progress, console: Console
) -> None:
    """What is about to happen, in a few lines."""
    shape = job.shape
    count = shape.num_parameters()
    console.print(
        f"{f'{count / 1e6:.1f}M' if count >= 1e6 else f'{count:,}'} parameters: {shape.layers} layers of "
        f"{shape.hidden}, {shape.vocabulary:,} pieces; {job.recipe.optimizer.name}, "
        f"{name_dtype(engine.dtype)}, ZeRO {engine.zero}"
    )
    where = f"{ranks.ranks} rank{'s' * (ranks.ranks > 1)} on {device.type}"
    threads = torch.get_num_threads()
    console.print(
        f"{where}, {threads} thread{'s' * (threads > 1)} each ({ranks.launcher}); data {job.data}, run {job.run}",
        markup=False,
        soft_wrap=True,
    )
    if progress.step:
        console.print(f"continues after step {progress.step:,}", markup=False)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
