"""Encoders with the head of a task, perhaps with a BiLSTM in between: their losses and logits.

n pieces, s sequences, m tagged words, H hidden; an item of a task has one sequence, or several to choose from. A BiLSTM
reads the rows of sequences without padding, W values each, and gives H.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence, unpack_sequence

from finetuning.scale import ScoreScale
from finetuning.settings import BiLstm
from pretraining.architectures.declaration import build_encoder, find_architecture
from pretraining.architectures.weights import Kind, TaskHead
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout
from pretraining.model.encoder import SITES, Encoder
from pretraining.model.fused import drop
from pretraining.model.shape import PIECE_HEAD, Shape
from pretraining.objectives.declaration import find_objective

AnyTaskModel = TypeVar("AnyTaskModel", bound="TaskModel")
NO_BILSTM = BiLstm()


@dataclass(frozen=True)
class TaskBatch(Batch):
    """Packed sequences with the labels of a task."""

    labels: Tensor | None
    """The labels of `Encoded`, one item after another; None where unknown."""
    words: Tensor
    """(m,) int64: indices in `pieces` of the words to tag; empty for other tasks."""
    words_of_items: tuple[int, ...] = ()
    """The number of these words in each item."""
    choices: int = 1
    """Sequences of an item."""
    kept: Callable[[], Tensor] | None = None
    """Reads the cached activations of these items."""

    @property
    def items(self) -> int:
        """The number of items."""
        return len(self.lengths) // self.choices

    def count_rows(self, kind: Kind) -> tuple[int, ...]:
        """Returns the number of logit rows of each item."""
        rows = self.choices if kind == "embeddings" else 1
        return {"spans": self.lengths, "tags": self.words_of_items}.get(kind, (rows,) * self.items)


class Output(NamedTuple):
    """The loss and the logits of a micro-batch."""

    loss: Tensor
    """Summed over the labels, of which a span has two; 0 where there are none."""
    logits: Tensor
    """(items, outputs), (items, choices), for spans (n, 2), for tags (m, outputs), for embeddings (s, H)"""
    language: Tensor
    """The loss of the language head, summed over all pieces but the first of every sequence; 0 where there is none."""


class TaskModel(Encoder):
    """The encoder with the linear head of transformers for this kind of task, or with a BiLSTM in between."""

    def __init__(
        self,
        shape: Shape,
        head: TaskHead,
        recompute: bool = False,
        scale: ScoreScale | None = None,
        bilstm: BiLstm = NO_BILSTM,
        language: bool = False,
    ):
        """`scale`: mean and spread of the targets; None if already folded into the head's weights. `language`: also
        train the left-to-right language head."""
        kind = find_architecture(shape.architecture)
        super().__init__(shape, kind, recompute)
        self.kind, self.averages, self.scale = head.kind, head.averages, scale or ScoreScale()
        self.has_bilstm = bilstm.hidden > 0
        declared = kind.task_head(shape, head)
        self.has_pooler = not self.has_bilstm and any(weight.ours.startswith("pooler.") for weight in declared)
        if self.has_pooler:
            self.pooler = kind.build_head("pooler", shape)
        self.head = nn.Linear(bilstm.hidden or shape.hidden, head.outputs)
        if self.has_bilstm:
            self.lstm = build_bilstm(shape.hidden, bilstm.hidden, bilstm.depth)
        self.has_language = language
        if language:
            self.masked_head = kind.build_head(PIECE_HEAD, shape, find_objective(shape).logits_at_once)

    def initialize(self: AnyTaskModel, seed: int) -> AnyTaskModel:
        """Draws fresh weights, the same on all ranks for a seed."""
        super().initialize(seed)
        if self.has_bilstm:
            initialize_bilstm(self.lstm, seed)
        return self

    def convert_for_answers(self, dtype: torch.dtype, device: torch.device) -> TaskModel:
        """Converts the model to a dtype for inference. The head of a score stays in fp32: its scale is folded in, and
        near 1,844 bf16 has steps of 8."""
        head = copy.deepcopy(self.head)
        moved = self.to(device, dtype)
        if self.kind == "score":
            moved.head = head.to(device)
        return moved.eval()

    def forward(self, batch: TaskBatch) -> Output:
        hidden = self.encode(batch) if self.has_language and self.training else None
        seen = self.compute_states(batch) if hidden is None else self.select_states(hidden, batch)
        learned = self.apply_head(seen, batch)
        language = torch.zeros((), device=learned.device) if hidden is None else self._language_loss(hidden, batch)
        return Output(compute_loss(self.kind, learned, batch, self.scale), self.scale.unscale(learned), language)

    def _language_loss(self, hidden: Tensor, batch: TaskBatch) -> Tensor:
        """Computes the loss of all pieces but each sequence's first, from those before them; 0 for a batch without
        labels."""
        sequences, count = len(batch.lengths), len(hidden) - len(batch.lengths)
        own = torch.arange(sequences, device=hidden.device)
        own = torch.repeat_interleave(own, batch.starts.diff().long() - 1, output_size=count)
        before = torch.arange(count, device=hidden.device) + own
        decoder = self.embeddings.word.weight
        loss: Tensor = self.masked_head(hidden[before], decoder, batch.pieces[before + 1])[0]
        return loss if batch.labels is not None else 0.0 * loss

    @property
    def sees_one(self) -> bool:
        """Whether the head reads only the one piece that stands for a sequence."""
        return self.kind not in ("spans", "tags") and not self.has_bilstm and not self.averages

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head, in fp32."""
        return self.scale.unscale(self.apply_head(self.compute_states(batch), batch))

    def compute_states(self, batch: TaskBatch) -> Tensor:
        """Computes the hidden states that the head reads, and no others of the last layer."""
        if self.has_bilstm or self.averages or self.kind == "spans":
            return self.select_states(self.encode(batch), batch)
        return self.encode(batch, batch.words if self.kind == "tags" else self.sequence_places(batch))

    def select_states(self, hidden: Tensor, batch: TaskBatch) -> Tensor:
        """Selects the hidden states that the head reads from those of all pieces, after the BiLSTM if there is one."""
        if self.has_bilstm:
            hidden = read_both_ways(self.lstm, hidden, batch.lengths)
        if self.kind == "spans":
            return hidden
        if self.kind == "tags":
            return hidden[batch.words]
        if self.has_bilstm or self.averages:
            return pool("max" if self.has_bilstm else "mean", hidden, batch.lengths)
        return hidden[self.sequence_places(batch)]

    def apply_head(self, seen: Tensor, batch: TaskBatch) -> Tensor:
        """Computes logits from the hidden states that the head reads."""
        pooled = self.pooler(seen) if self.has_pooler else seen
        if self.kind == "spans":
            return apply_in_fp32(self.head, pooled)
        if self.kind == "tags":
            return apply_in_fp32(self.head, self._drop(pooled, batch))
        logits = apply_in_fp32(self.head, self._drop(pooled, batch))
        return logits.view(-1, batch.choices) if self.kind == "choice" else logits

    def _drop(self, x: Tensor, batch: TaskBatch) -> Tensor:
        """Applies dropout before the head, with the same keys as in the layers."""
        if not self.training:
            return x.contiguous()
        hidden, _ = self.make_dropouts(batch)
        rows = batch.words if self.kind == "tags" else self.sequence_places(batch)
        keys = hidden.keys[rows] if len(hidden.keys) else hidden.keys
        return drop(x.contiguous(), Dropout(hidden.probability, keys, SITES * (len(self.layers) + 1)))


def apply_in_fp32(head: nn.Linear, x: Tensor) -> Tensor:
    """Applies the head in fp32: 16 bits would keep two decimals of a score."""
    return F.linear(x.float(), head.weight.float(), head.bias.float())


@torch.inference_mode()
def compute_logits(shape: Shape, head: TaskHead, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Computes the logits of a model: a row for each sequence, or for each piece (spans and tags); of a model of
    vectors the hidden state of each piece."""
    if head.kind == "embeddings":
        encoder = build_encoder(shape)
        encoder.load_state_dict(dict(weights))
        return encoder.eval().encode(batch)
    model = TaskModel(shape, head)
    model.load_state_dict(dict(weights))
    words = torch.arange(len(batch.pieces)) if head.kind == "tags" else batch.pieces[:0]
    parts = {part.name: getattr(batch, part.name) for part in fields(Batch)}
    return model.eval().logits(TaskBatch(**parts, labels=None, words=words))


def compute_loss(kind: Kind, logits: Tensor, batch: TaskBatch, scale: ScoreScale) -> Tensor:
    """Computes the summed loss of a micro-batch, of scores on the learned scale."""
    labels = batch.labels
    if labels is None:
        return 0.0 * logits.sum()
    if kind == "score":
        return F.mse_loss(logits.view(-1), scale.standardize(labels), reduction="sum")
    if kind == "labels":
        return F.binary_cross_entropy_with_logits(logits, labels.view_as(logits).float(), reduction="sum")
    if kind == "spans":
        first, last = labels.view(-1, 2).long().T
        sequences = [*torch.split(logits, list(batch.lengths))]
        begin, end = pad_sequence(sequences, batch_first=True, padding_value=-torch.inf).unbind(-1)
        return F.cross_entropy(begin, first, reduction="sum") + F.cross_entropy(end, last, reduction="sum")
    return F.cross_entropy(logits, labels.long(), reduction="sum")


def build_bilstm(width: int, hidden: int, depth: int) -> nn.LSTM:
    """Makes a BiLSTM of output width `hidden`, half of it for each direction."""
    return nn.LSTM(width, hidden // 2, depth, bidirectional=True)


def initialize_bilstm(lstm: nn.LSTM, seed: int) -> None:
    """Draws weights uniformly up to 1/√(width of a direction), as PyTorch does; the same on all ranks for a seed."""
    generator = torch.Generator().manual_seed(seed)
    bound = lstm.hidden_size**-0.5
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


def read_both_ways(lstm: nn.LSTM, rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Runs a BiLSTM over rows (n, W) of sequences of these lengths, some of them empty; returns (n, H)."""
    if not len(rows):
        return rows.new_zeros((0, 2 * lstm.hidden_size))
    sequences = [own for own in torch.split(rows, list(lengths)) if len(own)]
    read: PackedSequence = lstm(pack_sequence(sequences, enforce_sorted=False))[0]
    return torch.cat(unpack_sequence(read))


def pool(how: Literal["max", "mean"], rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Takes the maximum or the mean of the rows of each sequence, in fp32: (s, H)."""
    return torch.segment_reduce(rows.float(), how, lengths=torch.tensor(lengths, device=rows.device)).to(rows.dtype)
