"""Which micro-batches a phase can have, and the largest of them that fits into the memory of a rank.

The heaviest micro-batch decides: every sequence full, with the most predictions that the data has. Text fills less, so
what fits once fits in every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pretraining.config.settings import Dtype, divisors
from pretraining.model.shape import Shape
from pretraining.planning.memory import Memory, plan_activations

MARGIN = 0.05
"""Share of a GPU's memory that is left free, for its fragments and for the buffers between ranks."""
HOST_MARGIN = 0.5
"""The same of a machine's memory: others need it too, and what takes too much is killed."""
CPU_PIECES = 4096
"""A CPU is hardly faster with more: a core makes 8,400 pieces a second of mini with 1,024 in a micro-batch, 11,700 with
4,096, and 12,300 with 65,536, at length 128 in bf16."""
GPU_ELEMENTS = 2**31 - 1
"""Kernels number the elements of a tensor with 32 bits."""


@dataclass(frozen=True)
class Room:
    """The memory of a rank that a micro-batch is to fit into."""

    size: float
    """bytes: all that the GPU has, or this rank's part of what the machine has"""
    on_cpu: bool = False

    @property
    def usable(self) -> float:
        """What a rank may take of it."""
        return (1 - (HOST_MARGIN if self.on_cpu else MARGIN)) * self.size


@dataclass(frozen=True)
class Heaviest:
    """The heaviest micro-batches of a phase: full sequences, each with the most predictions."""

    shape: Shape
    dtype: Dtype
    length: int
    predictions: int
    """of a sequence"""
    recompute: bool
    """whether activations are computed again (`compute.checkpoint_activations`)"""

    def sizes(self, share: int, on_cpu: bool) -> list[int]:
        """What may be tried, in sequences, the smallest first: all that divides the share of a rank in the batch."""
        widest = max(3 * self.shape.hidden, self.shape.intermediate)
        elements = max(self.length * widest, self.predictions * self.shape.padded_vocabulary)  # of a sequence
        limit = CPU_PIECES // self.length if on_cpu else GPU_ELEMENTS // elements
        return [size for size in divisors(share) if size <= max(limit, 1)]

    def activations(self, sequences: int, on_cpu: bool) -> float:
        """Bytes, an estimate."""
        planned = plan_activations(self.shape, self.dtype, sequences, self.length, fused_attention=not on_cpu)
        return planned.recomputed if self.recompute else planned.kept


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of these sizes, given in their order, that fits; None where none does. Few are tried."""
    count = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[count - 1] if count else None


def fits_by_estimate(heaviest: Heaviest, memory: Memory, room: Room, sequences: int) -> bool:
    """Whether a micro-batch probably fits beside the weights, gradients and the optimizer's state."""
    return memory.device + heaviest.activations(sequences, room.on_cpu) <= room.usable
