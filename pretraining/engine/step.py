"""One step of training, for pre-training, fine-tuning and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_prep.common.hashing import hash_key
from pretraining.engine.engine import Engine
from pretraining.model.batch import StepBatches


class Seeds(NamedTuple):
    """The seeds of a step: functions of the run's seed and the step, so that a resumed run draws the same numbers."""

    dropout: int
    """for our kernels, the same on all ranks: masks depend on the example"""
    generator: int
    """for PyTorch's generator, which a GPU's attention uses; differs between ranks"""

    @classmethod
    def derive(cls, seed: int, step: int, rank: int) -> Seeds:
        """Derives the seeds of a step, counted from 0."""
        return cls(int(hash_key(seed, step)[0]), int(hash_key(seed, step, rank)[0]) >> 1)


class GivenUpError(Exception):
    """All ranks have given up a step or an evaluation before its end: the weights are as they were before it."""


class StepResult(NamedTuple):
    """The results of a step on this rank, left on the device: nothing here waits for a GPU."""

    losses: list[Tensor]
    """each micro-batch's part of the loss"""
    outputs: list[Any]
    """the outputs of the model for each micro-batch, detached"""
    gradient_norm: Tensor | float | None
    """the norm over all ranks, before clipping"""
    largest: float | None = None
    """with `same_bits`, the largest gradient that sums can take; the norm is infinite after a larger one"""


def train_step(
    engine: Engine,
    batches: StepBatches[Any],
    learning_rate: float,
    seeds: Seeds,
    loss_of: Callable[[Any, Any], Tensor],
    mark: Callable[[], None] = lambda: None,
    gives_up: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Moves the weights once, by the gradients of the micro-batches of all ranks.

    `loss_of` computes a micro-batch's part of the loss from the output of the model; the sum over micro-batches and
    ranks is minimised. `mark` is called before this rank may wait for others. `gives_up` is called between
    micro-batches and must return the same on all ranks; GivenUpError is raised where it returns True.
    """
    seed_step(engine, seeds)
    losses, outputs, deal = [], [], batches.deal
    turns = len(batches.micro) if deal is None else deal.turns
    largest = None
    if engine.same_bits:
        assert deal is not None, "the micro-batches of all ranks limit a gradient"
        largest = engine.expect(deal.total)
    for turn in range(turns):
        mark()
        if turn and gives_up():
            raise GivenUpError
        if turn == len(batches.micro):  # in the last turn, which other ranks have a micro-batch for
            engine.join_gradients(mark)
            break
        if deal is not None and engine.same_bits:
            number = turn * deal.ranks + deal.rank
            seed_step(engine, seeds._replace(generator=int(hash_key(seeds.dropout, number)[0]) >> 1))
        output = engine.forward(batches.micro[turn].to(engine.device))
        loss = loss_of(output, batches)
        engine.backward(loss, last=turn == turns - 1, mark=mark)
        losses.append(loss.detach())
        outputs.append(_detach(output))
    engine.step(learning_rate)
    mark()
    return StepResult(losses, outputs, engine.gradient_norm, largest)


def seed_step(engine: Engine, seeds: Seeds) -> None:
    """Seeds dropout, and the generators of a step. Without a GPU, `torch.manual_seed` would record the stack of its
    caller for each kind of generator, at every step."""
    engine.model.dropout_seed = seeds.dropout
    if engine.device.type == "cpu":
        torch.default_generator.manual_seed(seeds.generator)
    else:
        torch.manual_seed(seeds.generator)


def _detach(output: Any) -> Any:
    """Detaches a model's output, which is a tensor or a named tuple of tensors."""
    return output.detach() if isinstance(output, Tensor) else type(output)(*(part.detach() for part in output))
