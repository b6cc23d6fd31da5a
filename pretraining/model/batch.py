"""What the model eats: sequences one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from data_prep.common.arrays import Array


@dataclass(frozen=True)
class Batch:
    """Sequences one after another, no padding: s sequences, n pieces, m predictions."""

    pieces: Tensor  # (n,) int64: all sequences one after another, masks applied
    segments: Tensor  # (n,) int64: 0 in A, 1 in B
    positions: Tensor  # (n,) int64: 0 … within each sequence
    starts: Tensor  # (s + 1,) int32: where each sequence begins; the last is n
    chosen: Tensor  # (m,) int64: indices into `pieces` of the predicted positions, ascending
    labels: Tensor  # (m,) int64: the pieces that stood there
    random_next: Tensor  # (s,) int64: the NSP label, 1 where B is random
    lengths: tuple[int, ...]  # of the sequences, on the host: kernels are chosen by it without asking the GPU
    examples: Array  # (s, 2) int64: shard (its number in the dataset) and row, to name them in messages

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; the host does not wait for the copy to a GPU."""
        device = torch.device(device)
        if device.type == "cpu":
            return self
        pin = device.type == "cuda"
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = (value.pin_memory() if pin else value).to(device, non_blocking=True)
        return Batch(**values)


@dataclass(frozen=True)
class StepBatches:
    """What one rank does in one optimizer step."""

    micro: tuple[Batch, ...]  # gradient accumulation; this rank's
    sequences: int  # of the global batch, over all ranks
    predictions: int  # of the global batch: losses are divided by it, so that ranks and micro-batches do not matter
    pieces: int  # real pieces of the global batch
    waited: float = 0.0  # seconds the trainer waited for it
