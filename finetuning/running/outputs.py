"""Computes logits, in training over all ranks or for any items alone, and scores them; and the activations of frozen
encoders, which are the same in every epoch, so that they are computed once and kept in memory.

Every rank keeps the activations of all items, since an epoch may give it any of them. A start computes them in the same
batches as the start before it, so that a run that was stopped continues exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.errors import SharedError, UserError
from data_prep.common.progress import duration
from data_prep.common.reading import parse_overrides
from data_prep.common.toml_text import dotted, toml_value
from finetuning.inputs import Encoded, Items, Ragged
from finetuning.model.features import FrozenEncoders
from finetuning.model.heads import TaskBatch, TaskModel
from finetuning.results import BASELINE, Baseline, Figures, ModelScores
from finetuning.running.base import Base, Run, read_fine_tuned
from finetuning.running.batches import count_pieces, encode_in_order, make_evaluation_batches, pack, split_by_pieces
from finetuning.running.records import describe
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.architectures.weights import Kind
from pretraining.checkpoint.loop import give_up_if_asked
from pretraining.checkpoint.models import StoredModel
from pretraining.engine.engine import Engine, is_shortage
from pretraining.engine.precision import choose_dtype
from pretraining.engine.step import GivenUpError
from pretraining.huggingface.folders import read_task
from pretraining.huggingface.pooling import LENGTH
from pretraining.processes.context import Context
from pretraining.processes.group import exchange, gather, shared_errors
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


def iterate_logits(
    forward: Forward, kind: Kind, items: Items, device: torch.device, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Array, Ragged]]:
    """Yields the logits of this rank's items, in batches of sequences of like lengths, with the items' numbers."""
    for numbers, batch in make_evaluation_batches(items, rank, ranks):
        with torch.no_grad():
            values = forward(batch.to(device)).float().cpu().numpy()
        yield numbers, Ragged(values, np.cumsum(batch.count_rows(kind), dtype=np.int64))


def sort_outputs(parts: list[tuple[Array, Ragged]]) -> Ragged:
    """Sorts the outputs of batches by item; a repeated batch counts once."""
    if len(parts) == 1 and len(parts[0][0]) == 1:
        return parts[0][1]
    numbers, first = np.unique(np.concatenate([numbers for numbers, _ in parts]), return_index=True)
    assert np.array_equal(numbers, np.arange(len(numbers))), "an item was not computed"
    return Ragged.join(outputs for _, outputs in parts).take(first)


KEPT_GB = 4.0
"""Gigabytes of activations of frozen encoders that a machine keeps in memory: every machine has these."""
LAID_OUT = ("length", "tags.document_context", "spans.stride", "spans.question", "spans.answer", "embeddings.widths")
"""Settings of the layout of text, and of its vectors, which a fine-tuned model's folder stores."""
MOST = 256
"""Pieces of a text whose vector is trained, where the model's folder names no limit: as the recipe has it."""


def compute_model_outputs(task: Task, model: StoredModel, settings: FineTuning, context: Context) -> Outputs:
    """Computes the logits of all splits with a fine-tuned model, or the vectors of any encoder. All ranks call it
    together."""
    dtype = choose_dtype(settings.precision.dtype, context.device)
    with shared_errors():
        if task.head.kind == "embeddings":
            forward = Base(model).build_model(task.head, settings).to(context.device, dtype).eval().logits
        else:
            weights, notes = read_fine_tuned(model, task.head)
            for note in notes:
                context.console.print(note)
            averages = model.head is not None and model.head.averages
            network = TaskModel(model.shape, replace(task.head, averages=averages))
            network.load_state_dict(weights)
            forward = network.convert_for_answers(dtype, context.device).logits
    try:
        return compute_all_logits(forward, task.head.kind, {**task.dev, **task.test}, context)
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


def write_baseline(run: Run) -> Iterator[str]:
    """Scores the baseline of the task of a run that trains, and writes it into the task's folder, unless it is there
    for this data; yields lines for the user. It never fails the command."""
    task, folder, data, began = run.task, run.folder.parent, run.begun.data, time.monotonic()
    if not run.trains or run.find_baseline():
        return
    try:
        how, outputs = task.answer_by_baseline() or ("", {})
        if not how:
            return
        scored = add_certainty(task, score_splits(task, outputs), outputs)
        Baseline(how=how, data=data, **scored.get_figures()).write(folder / BASELINE)
    except Exception as error:  # no word in any text, too little memory, a full disk: the runs are worth more
        cure = "; pip install scikit-learn" * isinstance(error, ImportError)
        yield f"{task.name}: no baseline: {type(error).__name__}: {error}{cure}"
    else:
        yield f"{task.name}: baseline, {how}: {describe(scored, task.metric)}  ({duration(time.monotonic() - began)})"


def list_layout_overrides(base: Base, vectors: bool, overrides: Sequence[str]) -> list[str]:
    """Lists the overrides that repeat the layout of text of a model that was fine-tuned or makes `vectors`, but for
    those that are given."""
    folder, given = base.model.folder, {*map(dotted, parse_overrides(overrides)[0])}
    known = read_task(folder)
    if vectors:
        longest = base.pooling.length
        known["length"] = longest if (folder / LENGTH).is_file() else min(longest, MOST)
    own = {name: known.get(name.rpartition(".")[2]) for name in LAID_OUT if name not in given}
    return [f"--{name}={toml_value(value)}" for name, value in own.items() if value is not None]


@dataclass(frozen=True)
class KeptItems(Items):
    """The items of a split with their activations."""

    items: Items
    activations: Tensor  # (rows of all items, k, W)
    rows: Ragged
    """The rows of every item: one for each piece, or for each tagged word."""

    def __len__(self) -> int:
        return len(self.items)

    def encode(self, numbers: Array) -> Encoded:
        """Makes model inputs of these items."""
        return replace(self.items.encode(numbers), kept=self.read)

    def read(self, numbers: Array) -> Tensor:
        """Reads the activations (r, k, W) of these items, one after another."""
        return self.activations[torch.from_numpy(self.rows.take(numbers).values)]


def keep_activations(
    splits: Mapping[str, Items],
    frozen: FrozenEncoders,
    dtype: torch.dtype,
    context: Context,
    say: Callable[[str], None],
) -> Mapping[str, Items]:
    """Returns the items with their activations; unchanged if those of all ranks of a machine take more than
    KEPT_GB. All ranks call it together."""
    rows = {split: count_rows(items) for split, items in splits.items()}
    values = frozen.count * frozen.width * sum(map(len, (each.values for each in rows.values())))
    size = values * dtype.itemsize * max(gather(context.world.local_size)) / 1e9
    what = f"activations of {', '.join(splits)} take {size:,.3g} GB of memory"
    if size > KEPT_GB:
        say(f"{what}, more than {KEPT_GB:g}: they are computed again in every epoch")
        return splits
    say(f"{what}, and are computed once")
    return {split: compute_activations(items, rows[split], frozen, dtype, context) for split, items in splits.items()}


def count_rows(items: Items) -> Ragged:
    """Numbers the rows that frozen encoders compute for every item: its pieces, or its tagged words."""
    encoded = (encoded for _, encoded in encode_in_order(items))
    lengths = [count_pieces(each) if each.words is None else each.words.lengths for each in encoded]
    ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))
    return Ragged(np.arange(ends[-1] if len(ends) else 0), ends)


def compute_activations(
    items: Items, rows: Ragged, frozen: FrozenEncoders, dtype: torch.dtype, context: Context
) -> KeptItems:
    """Computes the activations of all items; GivenUpError if a signal asks to stop."""
    kept = torch.empty(len(rows.values), frozen.count, frozen.width, dtype=dtype)
    for numbers, encoded in encode_in_order(items):
        for chosen in split_by_pieces(np.arange(len(encoded)), count_pieces(encoded)):
            give_up_if_asked(context)
            batch = pack(encoded, chosen, numbers).to(context.device)
            kept[torch.from_numpy(rows.take(numbers[chosen]).values)] = frozen.compute_rows(batch, dtype).cpu()
    return KeptItems(items, kept, rows)
