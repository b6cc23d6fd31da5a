"""Where a run begins or goes on: its last good checkpoint, and the model with the weights of this point."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import astuple, replace

import torch

from data_prep.common.errors import DamageError, UserError
from data_prep.vocabulary.source import read_vocabulary
from pretraining.checkpoint.reading import find_newest_whole, list_fresh, restore_model
from pretraining.checkpoint.record import list_finished
from pretraining.checkpoint.state import RunState, Saved
from pretraining.checkpoint.writing import find_free_name
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.weights import check_finite
from pretraining.mesh.mesh import Mesh
from pretraining.model.batch import CPU
from pretraining.model.encoder import PretrainingModel
from pretraining.model.shape import Shape
from pretraining.objectives import declaration as objectives
from pretraining.processes import group
from pretraining.processes.context import Context
from pretraining.training.branching import require_own_branch
from pretraining.training.origin import StartingPoint, begin_with, describe_change
from pretraining.training.request import Request
from pretraining.training.same_bits import choose_threads, require_same_conditions
from pretraining.training.skips import Skip, read_skips


def find_latest(request: Request, context: Context) -> Saved | None:
    """Finds the checkpoint to continue from; None for a new run."""
    checkpoint = find_newest_whole(request.out, context.warn)
    latest = None if checkpoint is None else Saved.read(checkpoint)
    if latest is not None and request.branch is not None:
        require_own_branch(latest, request.branch, request.out)
    return latest


def set_leaps_aside(request: Request, context: Context, can_begin: bool) -> None:
    """Renames the newest checkpoints that were saved after the loss had leapt, so that no run continues from them. All
    ranks call it together. If the run cannot begin anew, as without its base model, the first checkpoint is kept."""
    can_begin &= request.origin is not None or request.recipe.base_model is None
    there = list_finished(request.out) if context.world.rank == 0 else []
    with group.shared_errors():
        for checkpoint in reversed(there if can_begin else there[1:]):
            with contextlib.suppress(DamageError):
                if (leapt := Saved.read(checkpoint).run.leapt) is None:
                    break
                aside = find_free_name(checkpoint)
                try:
                    shutil.move(checkpoint, aside)
                except OSError as error:
                    raise UserError(f"{checkpoint}: cannot be moved to {aside.name}: {error}") from error
                context.warn(f"{aside}: saved when the loss had leapt to {leapt:.3g}: no run goes on from it")


def find_starting_point(request: Request, context: Context, latest: Saved | None, mesh: Mesh) -> StartingPoint:
    """Builds this rank's model, with the weights that it begins or goes on with; all ranks call it together."""
    compute = request.recipe.compute
    torch.set_num_threads(choose_threads(latest, request, context))
    set_arithmetic(request.recipe.precision, compute, context.device)
    require_same_conditions(latest, request, context)
    shape = request.shape_in(0 if latest is None else latest.run.state.phase)
    source = request.origin if latest is None else latest.record
    if source is not None:
        shape = replace(shape, initializer_range=source.shape.initializer_range)
    model = build_share(shape, compute.checkpoint_activations, mesh).initialize(request.recipe.seed)
    state = RunState(trained_segments=min(2 if request.corpora.common.has_pairs else 1, shape.segments))
    begins = None
    if latest is not None:
        restore_model(latest.folder, model, list_fresh(model, latest.record.shape))
        begins = describe_change(latest.record.shape, shape)
        check_finite(str(latest.folder), model.state_dict())
        state = latest.run.state
    elif request.origin is not None:
        begins = begin_with(model, state, request.origin, read_vocabulary(request.corpora.folder))
    skips = [Skip(*skip) for skip in group.gather([astuple(skip) for skip in read_skips(request.out)])[0]]
    return StartingPoint(model, state, latest, skips, begins)


def build_share(
    shape: Shape, recompute: bool, mesh: Mesh, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> PretrainingModel:
    """Builds this rank's share of the model, its weights without values."""
    with torch.device("meta"):
        model = objectives.build_model(shape, recompute)
        model.take_shares(mesh)
    return model.to(dtype).to_empty(device=device)
