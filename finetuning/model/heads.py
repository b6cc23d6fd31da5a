"""Encoders with the head of a task, and the losses that they learn from.

n pieces, s sequences, m tagged words, H hidden; an item of a task has one sequence, or several to choose from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetuning.model.bilstm import build_bilstm, initialize_bilstm, read_both_ways, take_maximum
from finetuning.scale import Scale
from finetuning.settings import BiLstm
from pretraining.huggingface.weights import Kind, TaskHead
from pretraining.model.batch import Batch
from pretraining.model.bert import PieceHead
from pretraining.model.encoder import SITES, Encoder
from pretraining.model.fused import Dropout, drop
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import find_objective

AnyTaskModel = TypeVar("AnyTaskModel", bound="TaskModel")
NO_BILSTM = BiLstm()


@dataclass(frozen=True)
class TaskBatch(Batch):
    """Packed sequences with what a task asks of them."""

    labels: Tensor | None
    """The right answers, as `Encoded` has them, one item after another; None where nobody knows."""
    words: Tensor
    """(m,) int64: indices into `pieces` of the words to tag; empty for other tasks."""
    words_of_items: tuple[int, ...] = ()
    """How many of these words every item has."""
    choices: int = 1
    """Sequences of an item."""
    kept: Callable[[], Tensor] | None = None
    """Reads what frozen encoders give of these items, where that is kept."""

    @property
    def items(self) -> int:
        """How many items of the task there are."""
        return len(self.lengths) // self.choices

    def count_rows(self, kind: Kind) -> tuple[int, ...]:
        """How many rows of the logits every item has."""
        per_piece: dict[Kind, tuple[int, ...]] = {"spans": self.lengths, "tags": self.words_of_items}
        return per_piece.get(kind, (1,) * self.items)


class Output(NamedTuple):
    """The loss and the logits of a micro-batch."""

    loss: Tensor
    """Summed over the labels, of which a span has two; 0 where there are none."""
    logits: Tensor
    """(items, outputs), (items, choices), for spans (n, 2), for tags (m, outputs)"""
    language: Tensor
    """The loss of the language head, summed over all pieces but the first of every sequence; 0 where there is none."""


class TaskModel(Encoder):
    """The encoder with a linear head, as transformers has it for the kind of task, or with a BiLSTM between the two."""

    def __init__(
        self,
        shape: Shape,
        head: TaskHead,
        recompute: bool = False,
        scale: Scale | None = None,
        bilstm: BiLstm = NO_BILSTM,
        language: bool = False,
    ):
        """`scale` is that of the numbers it is to learn; a head that was folded to it says them as it is. `language`:
        it goes on to learn by its language head too, which sees what is before a piece."""
        super().__init__(shape, recompute)
        self.kind, self.scale = head.kind, scale or Scale()
        self.has_bilstm = bilstm.hidden > 0
        if head.has_pooler and not self.has_bilstm:
            self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.head = nn.Linear(bilstm.hidden or shape.hidden, head.outputs)
        if self.has_bilstm:
            self.lstm = build_bilstm(shape.hidden, bilstm.hidden, bilstm.depth)
        self.has_language = language
        if language:
            self.masked_head = PieceHead(shape, find_objective(shape).logits_at_once)

    def initialize(self: AnyTaskModel, seed: int) -> AnyTaskModel:
        """Draws fresh weights, the same for a seed on any ranks."""
        super().initialize(seed)
        if self.has_bilstm:
            initialize_bilstm(self.lstm, seed)
        return self

    def convert_for_answers(self, dtype: torch.dtype, device: torch.device) -> TaskModel:
        """The model to answer with in these numbers: of scores the head stays in fp32, since their scale is in it, and
        1,844 in bf16 moves in steps of 8."""
        head = copy.deepcopy(self.head)
        moved = self.to(device, dtype)
        if self.kind == "score":
            moved.head = head.to(device)
        return moved.eval()

    def forward(self, batch: TaskBatch) -> Output:
        if self.has_language and self.training:
            hidden = self.encode(batch)
            learned, language = (
                self.apply_head(self.select_states(hidden, batch), batch),
                self._language_loss(hidden, batch),
            )
        else:
            learned = self.apply_head(self.compute_states(batch), batch)
            language = make_zero_loss(learned)
        return Output(compute_loss(self.kind, learned, batch, self.scale), self.scale.unscale(learned), language)

    def _language_loss(self, hidden: Tensor, batch: TaskBatch) -> Tensor:
        """The loss of all pieces but the first of a sequence, from those before them; 0 where none are learned from."""
        sequences, count = len(batch.lengths), len(hidden) - len(batch.lengths)
        own = torch.arange(sequences, device=hidden.device)
        own = torch.repeat_interleave(own, batch.starts.diff().long() - 1, output_size=count)
        before = torch.arange(count, device=hidden.device) + own
        decoder = self.embeddings.word.weight
        loss: Tensor = self.masked_head(hidden[before], decoder, batch.pieces[before + 1])[0]
        return loss if batch.labels is not None else 0.0 * loss

    @property
    def sees_one(self) -> bool:
        """Whether the head sees one piece of a sequence, that which stands for it, and no other."""
        return self.kind not in ("spans", "tags") and not self.has_bilstm

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head, in fp32."""
        return self.scale.unscale(self.apply_head(self.compute_states(batch), batch))

    def compute_states(self, batch: TaskBatch) -> Tensor:
        """Computes the hidden states that the head sees, and of the last layer no others."""
        if self.has_bilstm or self.kind == "spans":
            return self.select_states(self.encode(batch), batch)
        return self.encode(batch, batch.words if self.kind == "tags" else self.sequence_places(batch))

    def select_states(self, hidden: Tensor, batch: TaskBatch) -> Tensor:
        """The hidden states that the head sees, of those of all pieces; of a BiLSTM over them what it says of every
        piece or, of a whole sequence, the highest of that."""
        if self.has_bilstm:
            hidden = read_both_ways(self.lstm, hidden, batch.lengths)
        if self.kind == "spans":
            return hidden
        if self.kind == "tags":
            return hidden[batch.words]
        return take_maximum(hidden, batch.lengths) if self.has_bilstm else self.sequence_states(hidden, batch)

    def apply_head(self, seen: Tensor, batch: TaskBatch) -> Tensor:
        """Computes the logits of the hidden states that the head sees."""
        if self.kind == "spans":
            return apply_in_fp32(self.head, seen)
        if self.kind == "tags":
            return apply_in_fp32(self.head, self._drop(seen, batch, batch.words))
        pooled = seen if self.has_bilstm else torch.tanh(self.pooler(seen))
        logits = apply_in_fp32(self.head, self._drop(pooled, batch, self.sequence_places(batch)))
        return logits.view(-1, batch.choices) if self.kind == "choice" else logits

    def _drop(self, x: Tensor, batch: TaskBatch, rows: Tensor) -> Tensor:
        """Drops before the head, by the same keys as in the layers."""
        if not self.training:
            return x.contiguous()
        hidden, _ = self.make_dropouts(batch)
        keys = hidden.keys[rows] if len(hidden.keys) else hidden.keys
        return drop(x.contiguous(), Dropout(hidden.probability, keys, SITES * (len(self.layers) + 1)))


def make_zero_loss(like: Tensor) -> Tensor:
    """A loss of nothing, which has no gradient."""
    return torch.zeros((), device=like.device)


def apply_in_fp32(head: nn.Linear, x: Tensor) -> Tensor:
    """The head in fp32: of a score, 16 bits would keep two decimals."""
    return F.linear(x.float(), head.weight.float(), head.bias.float())


@torch.inference_mode()
def compute_logits(shape: Shape, head: TaskHead, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Computes the logits of a model: a row for every sequence or, of spans and tags, for every piece."""
    model = TaskModel(shape, head)
    model.load_state_dict(dict(weights))
    words = torch.arange(len(batch.pieces)) if head.kind == "tags" else batch.pieces[:0]
    parts = {part.name: getattr(batch, part.name) for part in fields(Batch)}
    return model.eval().logits(TaskBatch(**parts, labels=None, words=words))


def compute_loss(kind: Kind, logits: Tensor, batch: TaskBatch, scale: Scale) -> Tensor:
    """The loss of a micro-batch, summed; of numbers on the scale on which they are learned."""
    labels = batch.labels
    if labels is None:
        return 0.0 * logits.sum()
    if kind == "score":
        return F.mse_loss(logits.view(-1), scale.standardize(labels), reduction="sum")
    if kind == "labels":
        return F.binary_cross_entropy_with_logits(logits, labels.view_as(logits).float(), reduction="sum")
    if kind == "spans":
        first, last = labels.view(-1, 2).long().T
        begin, end = pad_logits(logits, batch).unbind(-1)
        return F.cross_entropy(begin, first, reduction="sum") + F.cross_entropy(end, last, reduction="sum")
    return F.cross_entropy(logits, labels.long(), reduction="sum")


def pad_logits(logits: Tensor, batch: Batch) -> Tensor:
    """(s, longest, 2): the logits of pieces, with minus infinity behind every sequence."""
    table = logits.new_full((len(batch.lengths), max(batch.lengths), logits.shape[-1]), -torch.inf)
    lengths = batch.starts.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=logits.device), lengths)
    return table.index_put((rows, batch.positions), logits)
