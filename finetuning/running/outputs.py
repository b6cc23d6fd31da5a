"""Computes logits, in training over all ranks or for any items alone, and scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.errors import SharedError, UserError
from data_prep.common.reading import parse_overrides
from data_prep.common.toml_text import dotted, toml_value
from finetuning.inputs import Items
from finetuning.model.heads import TaskBatch, TaskModel
from finetuning.ragged import Ragged
from finetuning.results import Figures, ModelScores
from finetuning.running.base import read_fine_tuned
from finetuning.running.batches import make_evaluation_batches
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.architectures.weights import Kind
from pretraining.checkpoint.models import StoredModel
from pretraining.engine.engine import Engine, is_shortage
from pretraining.engine.precision import choose_dtype
from pretraining.engine.step import GivenUpError
from pretraining.huggingface.folders import read_task
from pretraining.processes.context import Context
from pretraining.processes.group import exchange, shared_errors
from pretraining.processes.stopping import StoppedError

Outputs = dict[str, Ragged]
"""The logits of all items, in their order, by split."""
Forward = Callable[[TaskBatch], Tensor]
"""Computes the logits of a batch."""


class BrokenError(SharedError):
    """A run has diverged: its values are not finite. All ranks find it at once."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; take a smaller learning rate, or --precision.dtype fp32")


@contextmanager
def name_shortage() -> Iterator[None]:
    """Turns an out-of-memory error into a UserError with its cures."""
    try:
        yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        cure = "take a smaller model or BiLSTM, a smaller --micro_batch, or a shorter --length"
        raise UserError(f"this does not fit into memory; {cure}") from error


def give_up_if_asked(context: Context) -> None:
    """Raises GivenUpError if a signal asks to stop. All ranks call it together."""
    context.watch.mark()
    if context.control.stop_requested_anywhere():
        raise GivenUpError


def compute_outputs(engine: Engine, kind: Kind, splits: Mapping[str, Items], context: Context) -> Outputs:
    """Computes the logits of splits with a model in training."""
    engine.deepspeed.eval()
    try:
        return compute_all_logits(lambda batch: engine.forward(batch).logits, kind, splits, context)
    finally:
        engine.deepspeed.train()


def compute_all_logits(forward: Forward, kind: Kind, splits: Mapping[str, Items], context: Context) -> Outputs:
    """Computes the logits of splits, the same on every rank; GivenUpError if a signal asks to stop."""

    def forward_unless_stopped(batch: TaskBatch) -> Tensor:
        give_up_if_asked(context)
        return forward(batch)

    world = context.world
    mine = {
        name: list(iterate_logits(forward_unless_stopped, kind, items, context.device, world.rank, world.size))
        for name, items in splits.items()
    }
    found = {name: sort_outputs(parts if world.size == 1 else _gather_parts(parts)) for name, parts in mine.items()}
    for name, outputs in found.items():
        if not np.isfinite(outputs.values).all():
            raise BrokenError(f"what the model says of {name} is no number")
    return found


def _gather_parts(own: list[tuple[Array, Ragged]]) -> list[tuple[Array, Ragged]]:
    """Gathers the batches of outputs of all ranks, which call it together."""
    joined = Ragged.join(outputs for _, outputs in own)
    arrays = {"numbers": np.concatenate([numbers for numbers, _ in own]), "values": joined.values, "ends": joined.ends}
    found = map(load, exchange(save(arrays)))
    return [(each["numbers"], Ragged(each["values"], each["ends"])) for each in found]


@torch.no_grad()
def iterate_logits(
    forward: Forward, kind: Kind, items: Items, device: torch.device, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Array, Ragged]]:
    """Yields the logits of this rank's items, in batches of sequences of like lengths, with the items' numbers."""
    for numbers, batch in make_evaluation_batches(items, rank, ranks):
        values = forward(batch.to(device)).float().cpu().numpy()
        yield numbers, Ragged(values, np.cumsum(batch.count_rows(kind), dtype=np.int64))


def sort_outputs(parts: list[tuple[Array, Ragged]]) -> Ragged:
    """Sorts the outputs of batches by item; a repeated batch counts once."""
    if len(parts) == 1 and len(parts[0][0]) == 1:
        return parts[0][1]
    numbers, first = np.unique(np.concatenate([numbers for numbers, _ in parts]), return_index=True)
    assert np.array_equal(numbers, np.arange(len(numbers))), "an item was not computed"
    return Ragged.join(outputs for _, outputs in parts).take(first)


LAID_OUT = ("length", "tags.document_context", "spans.stride", "spans.question", "spans.answer", "spans.best")
"""Settings of the layout of text, which a fine-tuned model's folder stores."""


def compute_model_outputs(task: Task, model: StoredModel, settings: FineTuning, context: Context) -> Outputs:
    """Computes the logits of all splits with a fine-tuned model. All ranks call it together."""
    with shared_errors():
        weights, notes = read_fine_tuned(model, task.head)
    for note in notes:
        context.console.print(note)
    network = TaskModel(model.shape, task.head)
    network.load_state_dict(weights)
    network = network.convert_for_answers(choose_dtype(settings.precision.dtype, context.device), context.device)
    try:
        return compute_all_logits(network.logits, task.head.kind, {**task.dev, **task.test}, context)
    except GivenUpError:
        decision = context.control.decide(wrong=False, saving=0.0)
        stopped = f"{task.name}: stopped by {decision.cause}; the same command begins anew"
        raise StoppedError(stopped, decision) from None


def score_splits(task: Task, outputs: Outputs) -> dict[str, Figures]:
    """Computes the figures of all labelled splits."""
    return {split: task.score(split, outputs[split]) for split in task.dev}


def add_certainty(task: Task, scores: dict[str, Figures], outputs: Outputs) -> ModelScores:
    """Adds standard errors, counts and classes to the figures of a model."""
    certain = {split: vars(task.estimate_certainty(split, outputs[split])) for split in task.dev}
    figures = {name: {split: each[name] for split, each in certain.items()} for name in ("items", "spreads", "classes")}
    first = next(iter(task.dev))
    return ModelScores(scores=scores, **figures, degenerate=task.is_degenerate(first, outputs[first]))


def list_layout_overrides(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Lists the overrides that repeat a fine-tuned model's layout of text, but for those that are given."""
    known, given = read_task(folder), {*map(dotted, parse_overrides(overrides)[0])}
    own = {name: known.get(name.rpartition(".")[2]) for name in LAID_OUT if name not in given}
    return [f"--{name}={toml_value(value)}" for name, value in own.items() if value is not None]
