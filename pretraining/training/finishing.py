"""The end of a run: exports the trained model, draws its losses, and says how to load it."""

from __future__ import annotations

import json
from pathlib import Path

from rich.markup import escape

from data_prep.common.errors import UserError, quote
from pretraining.checkpoint.average import Average, find_average
from pretraining.checkpoint.record import AVERAGED, EXPORT
from pretraining.flags import Export
from pretraining.huggingface.folders import CONFIG
from pretraining.huggingface.weights import is_theirs
from pretraining.model.shape import Shape
from pretraining.objectives import declaration as objectives
from pretraining.processes.context import Context
from pretraining.reporting.figures import TRIAL, draw_losses
from pretraining.training.exporting import export
from pretraining.training.request import Request


def finish_run(request: Request, context: Context, trained_now: bool) -> None:
    """Exports the trained model unless it was exported before, draws its losses, and says how to load it."""
    out, console, folder = request.out, context.console, request.out / EXPORT
    if not trained_now:
        console.print(f"{out}: all that was asked for is trained already", markup=False, soft_wrap=True)
    if trained_now or not (folder / CONFIG).exists():
        export_weights(request, context, folder)
    try:
        if (average := find_average(out, request.recipe.checkpoints.average)) is not None:
            exported = Average.read(out) if (out / AVERAGED / CONFIG).exists() and not trained_now else None
            if exported is None or exported.steps != average.steps:
                export_weights(request, context, out / AVERAGED, len(average.steps))
                average.write(out)
            console.print(str(average), markup=False, soft_wrap=True)
            folder = out / AVERAGED if average.is_better else folder
    except UserError as error:
        context.warn(f"there is no average of the last checkpoints: {error}")
    console.print(draw_losses(out, objectives.list_loss_curves(), least=TRIAL), markup=False, soft_wrap=True)
    console.print(f"load it: {describe_loading(request.shape, folder)}", markup=False, soft_wrap=True)


def export_weights(request: Request, context: Context, folder: Path, average: int | None = None) -> None:
    """Exports the last weights of a run, or the average of its last checkpoints, and prints what was exported."""
    with context.console.status(escape(f"exporting to {folder}, and reading it back")):
        exported = export(Export(request.out, folder), average)
    context.console.print(str(exported), markup=False, soft_wrap=True)


def describe_loading(shape: Shape, folder: Path) -> str:
    """Returns the call of transformers that loads it, or a command of fine-tuning if transformers cannot."""
    if is_theirs(shape):
        objective, path = objectives.find_objective(shape), json.dumps(str(folder), ensure_ascii=False)
        said = "" if "loads_as" in vars(type(objective)) else f"a model that {objective.learns}"
        remark = "the logits at a piece predict the next one" if objective.shift else said
        return f"transformers.{objective.loads_as}.from_pretrained({path})" + (f"  # {remark}" if remark else "")
    model = quote(folder)
    return f"python finetuning/run_task.py TASK.toml --model {model}; no class of transformers computes this model"
