"""A whole run: connects the ranks, trains, returns to a checkpoint if training diverges, and exports the model."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.locks import LOCK, locked
from pretraining.checkpoint.record import EXPORT
from pretraining.checkpoint.writing import require_room
from pretraining.huggingface.config import is_theirs
from pretraining.huggingface.folders import CONFIG
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import find_objective, list_loss_curves
from pretraining.processes.context import Context
from pretraining.processes.ending import Ending
from pretraining.processes.errors import SharedError
from pretraining.processes.group import agree, choose_device, connect, disconnect, shared_errors
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch
from pretraining.reporting.console import show_waiting
from pretraining.reporting.loss_chart import TRIAL, draw_losses
from pretraining.training.changes import continue_run
from pretraining.training.exporting import export
from pretraining.training.guards import CURE, DivergedError
from pretraining.training.origin import StartingPoint
from pretraining.training.request import Request
from pretraining.training.resume import find_latest, find_starting_point, make_trainer, set_leaps_aside
from pretraining.training.skips import Skip, write_skips
from pretraining.training.trainer import Trainer

Device = Literal["auto", "cpu", "cuda"]
BUSY = "{owner} is training in this folder\nwait for its end, or name another folder"
REQUEUED = "SLURM_RESTART_COUNT"
"""Slurm sets this variable in a job that it has requeued."""
LEAVE_SECONDS = 300.0
"""How long a requeued job waits for the ranks of its last start: a rank that lost the network notices it late."""


def run_training(
    wanted: Device, out: Path | None, read_request: Callable[[], Request], ending: Ending, console: Console
) -> None:
    """Trains the rest of a run, and exports it. The ranks connect and then read the request together: an error on one
    rank is raised on all."""
    world, failure, device = ending.world, None, torch.device("cpu")
    try:
        device = choose_device(wanted, world)
    except UserError as error:
        failure = error
    connect(world, device, folder=out)
    with contextlib.ExitStack() as stack:
        with shared_errors():
            request = read_request()
            if failure is not None:
                raise failure
        control = stack.enter_context(Control(world, request.time_limit))
        with shared_errors():
            watch = Watch(world, hang=request.recipe.guards.hang, run=request.out, device=device)
            require_one_request(request)
            if world.rank == 0:
                patience = LEAVE_SECONDS if REQUEUED in os.environ else 0.0
                stack.enter_context(locked(request.out / LOCK, f"--out {request.out}", BUSY, patience=patience))
            ending.record_in(request.out)
            context = Context(world, device, console, control, watch)
            latest = find_latest(request, context)
            if latest is not None:
                request = continue_run(request, latest)
            trained = latest is not None and latest.run.is_trained
            if not trained:
                require_room(request.out)
            with show_waiting(console, "making the model", world.rank == 0):
                start = None if trained else find_starting_point(request, context, latest)
        with watch:
            is_done = start is None or train_through(request, context, start).is_done
            if world.rank == 0 and is_done:
                with watch.pause():
                    finish_run(request, context, trained_now=start is not None)
    disconnect()  # not after an error: it might wait for ever for ranks that are gone


def require_one_request(request: Request) -> None:
    """Raises an error on all ranks unless all were started with the same command and data."""
    agree({"recipe": request.recipe.as_dict(), "data": request.manifest.fingerprint}, "recipe and data")
    agree(request.stop_after, "--stop-after")
    agree(request.origin.identity if request.origin else None, f"the model {request.recipe.base_model}")


def train_through(request: Request, context: Context, start: StartingPoint) -> Trainer:
    """Trains to the end; if training diverges, returns to the last checkpoint and skips the batches concerned."""
    while True:
        with show_waiting(context.console, "getting ready to train", context.world.rank == 0):
            trainer = make_trainer(request, context, start)
        try:
            trainer.train()
            return trainer
        except DivergedError as error:  # `error` refers to the whole trainer, and ends with this block
            wrong = error.skip
        with context.watch.pause():
            trainer.saver.finish()
            set_leaps_aside(request, context)
            leave_out(wrong, request, context, trainer)
            trainer.close()
            del trainer, start
            gc.collect()
            request = replace(request, resume="auto", profile=0)  # the checkpoints and the profile are this run's own
            start = find_starting_point(request, context, find_latest(request, context))


def leave_out(wrong: Skip, request: Request, context: Context, trainer: Trainer) -> None:
    """Notes the batches to skip; raises SharedError after too many rollbacks."""
    allowed, before = request.recipe.guards.rollbacks, len(trainer.skips)
    if before >= allowed:
        raise SharedError(
            f"{wrong.reason}\n{before} times before, the run has gone back to a checkpoint for such a reason "
            f"(guards.rollbacks = {allowed}); {CURE}"
        )
    if context.world.rank == 0:
        write_skips(request.out, [*trainer.skips, wrong])
        context.warn(f"{wrong.reason}; the run goes back to its last checkpoint and leaves that out")


def finish_run(request: Request, context: Context, trained_now: bool) -> None:
    """Exports the trained model unless it was exported before, draws its losses, and says how to load it."""
    out, console, folder = request.out, context.console, request.out / EXPORT
    if not trained_now:
        console.print(f"{out}: all that was asked for is trained already", markup=False, soft_wrap=True)
    if trained_now or not (folder / CONFIG).exists():
        with show_waiting(console, f"exporting to {folder}, and reading it back"):
            exported = export(out, folder)
        console.print(str(exported), markup=False, soft_wrap=True)
        if exported.warning:
            context.warn(exported.warning)
    console.print(draw_losses(out, list_loss_curves(), least=TRIAL), markup=False, soft_wrap=True)
    console.print(f"load it: {describe_loading(request.shape, folder)}", markup=False, soft_wrap=True)


def describe_loading(shape: Shape, folder: Path) -> str:
    """Returns the call of transformers that loads it, or a command of fine-tuning if transformers cannot."""
    if is_theirs(shape):
        return f'transformers.{find_objective(shape).loads_as}.from_pretrained("{folder}")'
    return f"python finetuning/run_task.py TASK.toml --model {folder}; no class of transformers computes this model"
