"""One step of training: the same for pre-training, fine-tuning and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_prep.common.hashing import hash_key
from pretraining.engine.engine import Engine
from pretraining.model.batch import StepBatches


@dataclass(frozen=True)
class Seeds:
    """The random numbers of a step: functions of the run's seed and the step, so that a resumed run draws the same."""

    dropout: int
    """for our kernels, the same on all ranks: their masks are drawn by the example"""
    generator: int
    """for PyTorch's generator, which draws where our kernels do not, such as in a GPU's attention; another one for each
    rank"""

    @classmethod
    def derive(cls, seed: int, step: int, rank: int) -> Seeds:
        """The seeds of a step of a run, counted from 0."""
        return cls(int(hash_key(seed, step)[0]), int(hash_key(seed, step, rank)[0]) >> 1)


class GivenUpError(Exception):
    """All ranks have given up a step or an evaluation before its end: the weights are as they were before it."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step on this rank, left on the device: nothing here waits for a GPU."""

    losses: list[Tensor]
    """each micro-batch's part of what was minimised"""
    outputs: list[Any]
    """outputs of the model for each micro-batch, detached"""
    gradient_norm: Tensor | float | None
    """the norm over all ranks, before clipping"""


def train_step(
    engine: Engine,
    batches: StepBatches[Any],
    learning_rate: float,
    seeds: Seeds,
    loss_of: Callable[[Any, Any], Tensor],
    mark: Callable[[], None] = lambda: None,
    gives_up: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Moves the weights once, by the gradients of this rank's micro-batches and of all other ranks'.

    `loss_of` makes of the model's output the micro-batch's part of the loss; the sum of these over micro-batches and
    ranks is minimised. `mark` is called before this rank may wait for others. Between micro-batches `gives_up` is
    asked, which must say the same on all ranks; where it says yes, GivenUpError is raised.
    """
    engine.model.dropout_seed = seeds.dropout
    _seed(engine.device, seeds.generator)
    losses, outputs = [], []
    for number, batch in enumerate(batches.micro):
        mark()
        if number and gives_up():
            raise GivenUpError
        output = engine.forward(batch.to(engine.device))
        loss = loss_of(output, batches)
        engine.backward(loss, last=number == len(batches.micro) - 1, mark=mark)
        losses.append(loss.detach())
        outputs.append(_detach(output))
    engine.step(learning_rate)
    mark()
    return StepResult(losses, outputs, engine.gradient_norm)


def _seed(device: torch.device, seed: int) -> None:
    """Seeds the generators that a step may draw from. Where there is no GPU, `torch.manual_seed` would keep a note for
    each kind of them, with the stack of its caller, at every step."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _detach(output: Any) -> Any:
    """A model's output, a tensor or a named tuple of them, without what the backward pass needed."""
    return output.detach() if isinstance(output, Tensor) else type(output)(*(part.detach() for part in output))
