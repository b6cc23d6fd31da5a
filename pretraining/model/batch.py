"""Batches of a model: sequences one after another, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from data_prep.common.arrays import Array
from pretraining.model.rows import Rows

CPU = torch.device("cpu")
AnyBatch = TypeVar("AnyBatch", bound="Batch")
AnySteps = TypeVar("AnySteps", bound="StepBatches[Any]")


@dataclass(frozen=True)
class Batch:
    """Sequences for an encoder, packed one after another: s sequences, n pieces."""

    pieces: Tensor  # (n,) int64: all sequences one after another
    segments: Tensor  # (n,) int64: 0 in A, 1 in B
    positions: Tensor  # (n,) int64: 0 … within each sequence
    starts: Tensor  # (s + 1,) int32: where each sequence begins; the last is n
    lengths: tuple[int, ...]  # of the sequences, on the host: kernels are chosen by it without asking the GPU
    examples: Array  # (s, 2) int64: shard and row of each sequence: dropout is drawn by them, messages name them
    one_way: int = field(default=0, kw_only=True)  # in so many first sequences a piece sees only those before it

    def pin(self: AnyBatch) -> AnyBatch:
        """Copies the batch to pinned memory, from which a GPU copies asynchronously."""
        return self._move_tensors(Tensor.pin_memory)

    def to(self: AnyBatch, device: torch.device | str) -> AnyBatch:
        """Copies the batch to a device; the host does not wait for the copy to a GPU."""
        device = torch.device(device)
        if device.type == "cpu":
            return self
        batch = self.pin() if device.type == "cuda" and not self.pieces.is_pinned() else self
        return batch._move_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def _move_tensors(self: AnyBatch, move: Callable[[Tensor], Tensor]) -> AnyBatch:
        tensors: dict[str, Any] = {name: move(each) for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **tensors)

    def reverse_places(self) -> Tensor:
        """Computes for every place the piece that is there when each sequence is reversed: (n,) int64."""
        counts = self.starts.diff().long()
        lengths = torch.repeat_interleave(counts, counts, output_size=len(self.pieces))
        return torch.arange(len(self.pieces), device=self.pieces.device) + lengths - 1 - 2 * self.positions

    def reverse(self: AnyBatch) -> AnyBatch:
        """Reverses each sequence; every piece keeps its position and its segment."""
        turns = self.reverse_places()
        pieces, segments, positions = (ids[turns] for ids in (self.pieces, self.segments, self.positions))
        return replace(self, pieces=pieces, segments=segments, positions=positions)


@dataclass(frozen=True)
class PretrainingBatch(Batch):
    """Packed sequences with the labels of pre-training: m pieces to predict, and whether B follows A."""

    chosen: Tensor  # (m,) int64: indices into `pieces` of the predicted positions, ascending
    labels: Tensor  # (m,) int64: the piece to predict at each of them
    random_next: Tensor  # (s,) int64: the label of next-sentence prediction, 1 where B is random


def pack(rows: Rows, pieces: Array, chosen: Array, labels: Array, one_way: int = 0) -> PretrainingBatch:
    """Makes a batch: the model sees `pieces` instead of those of the rows, and predicts `labels` at the `chosen`
    places; in the first `one_way` sequences a piece sees only those before it."""
    positions = np.arange(len(rows.pieces)) - np.repeat(rows.starts, rows.lengths)
    segments = positions >= np.repeat(rows.boundaries, rows.lengths)
    return PretrainingBatch(
        pieces=torch.from_numpy(pieces),
        segments=torch.from_numpy(segments.astype(np.int64)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(np.append(rows.starts, len(rows.pieces)).astype(np.int32)),
        chosen=torch.from_numpy(chosen),
        labels=torch.from_numpy(labels),
        random_next=torch.from_numpy(rows.random_next),
        lengths=tuple(rows.lengths.tolist()),
        examples=rows.where,
        one_way=one_way,
    )


class Deal(NamedTuple):
    """Which of the micro-batches of a step a rank computes: those whose number modulo `ranks` is `rank`."""

    rank: int
    ranks: int
    total: int
    """the micro-batches of all ranks"""

    @property
    def turns(self) -> int:
        """The most micro-batches of a rank."""
        return -(-self.total // self.ranks)


@dataclass(frozen=True)
class StepBatches(Generic[AnyBatch]):
    """The micro-batches of one rank in one optimizer step, and the counts of the global batch.

    A loss is divided by the counts of the global batch, so that it depends neither on ranks nor on micro-batches.
    """

    micro: tuple[AnyBatch, ...]  # this rank's micro-batches, whose gradients accumulate
    sequences: int  # of the global batch, over all ranks
    deal: Deal | None = field(default=None, kw_only=True)  # which they are; without, each rank has equally many

    def pin_for(self: AnySteps, device: torch.device) -> AnySteps:
        """Copies the batches to pinned memory for a GPU; a thread does that ahead of the step."""
        if device.type != "cuda":
            return self
        return replace(self, micro=tuple(batch.pin() for batch in self.micro))


@dataclass(frozen=True)
class PretrainingBatches(StepBatches[PretrainingBatch]):
    """The batches of a step of pre-training, with the count of pieces to predict, and of all pieces."""

    predictions: int  # of the global batch, over all ranks
    pieces: int = 0  # likewise
    one_way: int = 0  # predictions of the sequences that were drawn to see one way
    one_way_sequences: int = 0  # the number of these sequences
