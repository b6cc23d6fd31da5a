"""What a model says of items: in training over all ranks, or of any items alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from finetuning.inputs import Items
from finetuning.model.heads import Output, TaskBatch
from finetuning.ragged import Ragged
from finetuning.running.batches import evaluation_batches
from pretraining.engine.engine import Engine, is_shortage
from pretraining.engine.step import GivenUpError
from pretraining.huggingface.weights import Kind
from pretraining.processes.context import Context
from pretraining.processes.errors import SharedError
from pretraining.processes.group import gather

Outputs = dict[str, Ragged]
"""What a model says of splits, by their names: the logits of all items, in their order."""
Forward = Callable[[TaskBatch], Tensor]
"""Computes the logits of a batch."""


class BrokenError(SharedError):
    """A run has gone wrong for good: what it computes is no number. All ranks find it at once."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; take a smaller learning rate, or --precision.dtype fp32")


@contextmanager
def shortage_told() -> Iterator[None]:
    """Tells a shortage of memory as what it is."""
    try:
        yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise UserError("this does not fit into memory; take a smaller --micro_batch, or a shorter --length") from error


def outputs_of(engine: Engine, kind: Kind, splits: Mapping[str, Items], context: Context) -> Outputs:
    """What a model in training says of splits, as `all_logits` tells it."""

    def forward(batch: TaskBatch) -> Tensor:
        output: Output = engine.forward(batch)
        return output.logits

    engine.deepspeed.eval()
    try:
        return all_logits(forward, kind, splits, context)
    finally:
        engine.deepspeed.train()


def all_logits(forward: Forward, kind: Kind, splits: Mapping[str, Items], context: Context) -> Outputs:
    """What a model says of splits, the same on every rank; GivenUpError where a signal asks to stop."""

    def heard(batch: TaskBatch) -> Tensor:
        context.watch.mark()
        if context.control.asked_anywhere():
            raise GivenUpError
        return forward(batch)

    world = context.world
    mine = {
        name: list(logits_in_batches(heard, kind, items, context.device, world.rank, world.size))
        for name, items in splits.items()
    }
    ranks = gather(mine) if world.size > 1 else [mine]
    found = {name: in_order([part for rank in ranks for part in rank[name]]) for name in splits}
    for name, outputs in found.items():
        if not np.isfinite(outputs.values).all():
            raise BrokenError(f"what the model says of {name} is no number")
    return found


@torch.no_grad()
def logits_in_batches(
    forward: Forward, kind: Kind, items: Items, device: torch.device, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Array, Ragged]]:
    """Yields the logits of this rank's items, in batches of sequences of like lengths, with the items' numbers."""
    for numbers, batch in evaluation_batches(items, rank, ranks):
        values = forward(batch.to(device)).float().cpu().numpy()
        yield numbers, Ragged(values, np.cumsum(batch.rows(kind), dtype=np.int64))


def in_order(parts: list[tuple[Array, Ragged]]) -> Ragged:
    """The outputs of items by their numbers, of which a batch that came twice is taken once."""
    numbers, first = np.unique(np.concatenate([numbers for numbers, _ in parts]), return_index=True)
    assert np.array_equal(numbers, np.arange(len(numbers))), "an item was not computed"
    return Ragged.joined(outputs for _, outputs in parts).take(first)
