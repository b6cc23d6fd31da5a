"""Detects training that diverges: a loss or gradient that is not finite, or a loss that leaps.

The run returns to its last checkpoint and skips the batches concerned, which are noted in its folder.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.errors import SharedError, name_ranks
from pretraining.engine.step import StepResult
from pretraining.mesh.mesh import Mesh
from pretraining.model.batch import StepBatches
from pretraining.processes.group import find_greatest, host_group
from pretraining.training.skips import Skip

CURE = "lower the learning rate, lengthen its warm-up or clip the gradient (optimizer.clip)"
LIMITED = "a gradient is above the limit of parallel.same_bits, "
LIMIT_CURE = "go on with --parallel.same_bits false, or begin a new run with a larger micro_batch"
REMEMBERED = 20
"""Number of logged losses whose median a leap is measured against."""
MOST = 1 << 32
"""More than any hash of batches."""
NAMED = 4
"""Number of examples that a message names."""


class DivergedError(SharedError):
    """Training cannot go on from here."""

    def __init__(self, skip: Skip):
        super().__init__(skip.reason)
        self.skip = skip


class Finding(NamedTuple):
    """A fault in a step, as one rank found it."""

    step: int
    batch: int
    """number of the batch in the order of the phase"""
    text: str
    gradient: bool = False
    """whether it is in the gradient of all ranks together; a rank with a bad loss of its own knows more"""


class Guard:
    """Keeps losses and norms until they are checked, so that the host need not wait for the GPU in each step."""

    def __init__(self, rank: int, ranks: int, spike: float, scaled: bool, counts: bool = True):
        """`scaled`: the loss is scaled, so a gradient that is not finite only lowers the scale. `counts`: the
        losses of this rank enter the sum over ranks; of ranks that share a model, only those of the first do."""
        self._rank, self._ranks, self._spike, self._scaled, self._counts = rank, ranks, spike, scaled, counts
        self._kept: list[tuple[int, int, list[Tensor], Tensor | float | None, float | None, list[Array]]] = []
        self.losses: deque[float] = deque(maxlen=REMEMBERED)
        """the latest losses that were logged in this phase"""
        self.recent: deque[float] = deque(maxlen=REMEMBERED)
        """this rank's parts of the losses of the latest checked steps of this phase"""

    def add(self, step: int, batch: int, result: StepResult, batches: StepBatches[Any]) -> None:
        """Keeps the result of a step of this rank, and the examples of its micro-batches."""
        examples = [micro.examples for micro in batches.micro]
        self._kept.append((step, batch, result.losses, result.gradient_norm, result.largest, examples))

    def first_fault(self) -> Finding | None:
        """Finds the first fault since the last call."""
        kept, self._kept = self._kept, []
        for step, batch, losses, norm, largest, examples in kept:
            for loss, own in zip(losses, examples, strict=True):
                if not bool(torch.isfinite(loss)):
                    text = f"the loss is {float(loss)} at step {step} on rank {self._rank}, of {name_examples(own)}"
                    return Finding(step, batch, text)
            if norm is not None and not self._scaled and not math.isfinite(norm):
                whose = f"it is not known which of {self._ranks} ranks had what made it so"
                if self._ranks == 1:
                    whose = f"rank 0 had {name_examples([row for rows in examples for row in rows])}"
                what = f"the norm of the gradient is {float(norm)}"
                what = f"{LIMITED}{largest:,.5g}," if largest is not None and norm == math.inf else what
                return Finding(step, batch, f"{what} at step {step}; {whose}", True)
            self.recent.append(sum(map(float, losses)) * self._counts)
        return None

    def is_leap(self, loss: float) -> bool:
        """Whether a logged loss is far above the losses before it."""
        if self._spike and len(self.losses) >= REMEMBERED // 2 and loss > median(self.losses) + self._spike:
            return True
        self.losses.append(loss)
        return False

    def find_leap(self) -> float | None:
        """Returns the last step's loss if it exceeds the median of the losses before it by the spike limit, else None.

        Unlike `is_leap`, one loss before it is enough: this only bars a checkpoint from rollbacks. All ranks call it.
        """
        if not self._spike or not self.recent:
            return None
        losses = torch.tensor([*self.recent], dtype=torch.float64)
        dist.all_reduce(losses, group=host_group())
        *before, last = losses.tolist()
        return last if last > median([*self.losses, *before] or [last]) + self._spike else None

    def begin_phase(self) -> None:
        """Forgets the losses of the last phase: between phases a loss may leap."""
        self.losses.clear()
        self.recent.clear()


def choose_first(findings: Iterable[Finding | None]) -> Finding:
    """Chooses the finding to report: that of the first step, and there a loss before a gradient."""
    return min((found for found in findings if found is not None), key=lambda found: (found.step, found.gradient))


class BatchCheck:
    """Compares the batches of the ranks that share a model: all of them must have read the same."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._hash = mesh, 0

    def add(self, batches: StepBatches[Any]) -> None:
        """Adds the batches of a step, which are in the host's memory, to the hash of those since the last `compare`."""
        for micro in batches.micro if self._mesh.tensor_ranks > 1 else ():
            for values in vars(micro).values():
                if isinstance(values, Tensor):
                    self._hash = crc32(values.numpy().tobytes(), self._hash)

    def compare(self, step: int) -> None:
        """Raises SharedError, on all ranks, which call it together, if ranks that share a model have read others."""
        mesh, known, self._hash = self._mesh, self._hash, 0
        if mesh.tensor_ranks == 1:
            return
        own = torch.zeros(mesh.data_ranks, 2, dtype=torch.float64)
        own[mesh.data_rank] = torch.tensor([known, MOST - known], dtype=torch.float64)
        sums = find_greatest(own, host_group()).sum(1).tolist()  # the greatest hash, and what the least one lacks
        if wrong := [group for group, found in enumerate(sums) if found != MOST]:
            ranks = name_ranks(range(wrong[0] * mesh.tensor_ranks, (wrong[0] + 1) * mesh.tensor_ranks))
            raise SharedError(
                f"{ranks} share a model, but have read different batches in the steps up to {step}\n"
                "all ranks need the same files and version of the code: check what the machines see"
            )


def name_examples(examples: Sequence[Any] | Array) -> str:
    """Names examples by shard and row, the first few."""
    shown = ", ".join(f"shard {shard} row {row}" for shard, row in list(examples)[:NAMED])
    return f"{shown}, … ({len(examples)} examples)" if len(examples) > NAMED else shown
