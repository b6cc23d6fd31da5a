"""Scores without training: of a model that is fine-tuned already, or of a task that is answered without any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data_prep.common.reading import parse_overrides
from data_prep.common.toml_text import toml_value
from finetuning.model.heads import TaskModel
from finetuning.model.models import Model
from finetuning.results import Figures, ModelScores
from finetuning.running.outputs import Outputs, all_logits
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.engine.precision import choose_dtype
from pretraining.engine.step import GivenUpError
from pretraining.huggingface.folders import read_task
from pretraining.processes.context import Context
from pretraining.processes.group import shared_errors
from pretraining.processes.stopping import StoppedError

LAID_OUT = ("length", "spans.stride", "spans.question", "spans.answer", "spans.best")
"""Settings that decide how text is laid out, which the folder of a fine-tuned model knows."""


def outputs_without_model(task: Task) -> Outputs | None:
    """The outputs for all splits of a task that is answered without a model; None where one is trained."""
    found = {split: task.outputs_without_model(split) for split in (*task.dev, *task.test)}
    return {split: outputs for split, outputs in found.items() if outputs is not None} or None


def outputs_of_model(task: Task, model: Model, settings: FineTuning, context: Context) -> Outputs:
    """What a model that was fine-tuned before says of all splits. All ranks call it together."""
    with shared_errors():
        weights, notes = model.read_fine_tuned(task.head)
    for note in notes:
        context.console.print(note, markup=False, highlight=False)
    network = TaskModel(model.shape, task.head)
    network.load_state_dict(weights)
    network = network.in_numbers(choose_dtype(settings.precision.dtype, context.device), context.device)
    try:
        return all_logits(network.logits, task.head.kind, {**task.dev, **task.test}, context)
    except GivenUpError:
        decision = context.control.decide(wrong=False, saving=0.0)
        raise StoppedError(
            f"{task.name}: stopped by {decision.cause}; the same command begins anew", decision
        ) from None


def scores_of(task: Task, outputs: Outputs) -> dict[str, Figures]:
    """The figures of all splits that have labels."""
    return {split: task.score(split, outputs[split]) for split in task.dev}


def with_certainty(task: Task, scores: dict[str, Figures], outputs: Outputs) -> ModelScores:
    """Adds to the figures of a model how sure they are."""
    certain = {split: task.certainty(split, outputs[split]) for split in task.dev}
    first = next(iter(task.dev))
    return ModelScores(
        scores=scores,
        items={split: each.items for split, each in certain.items()},
        spreads={split: each.spreads for split, each in certain.items()},
        classes={split: each.classes for split, each in certain.items()},
        degenerate=task.is_degenerate(first, outputs[first]),
    )


def as_it_was_trained(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Overrides by which text is laid out as in the training of a fine-tuned folder, but for what is given."""
    known, given = read_task(folder), {".".join(map(str, override.key)) for override in parse_overrides(overrides)[0]}
    own = {name: known.get(name.rpartition(".")[2]) for name in LAID_OUT if name not in given}
    return [f"--{name}={toml_value(value)}" for name, value in own.items() if value is not None]
