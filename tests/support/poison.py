"""Steps of which one has a gradient that is not finite, and what an engine holds after each."""

from __future__ import annotations

from collections.abc import Sequence

from support.pretraining_reference import random_batch
from torch import Tensor

from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import PretrainingBatches
from pretraining.objectives.mlm import OBJECTIVE as MLM


def poison_second_step(engine: Engine, lengths: Sequence[int], poison: float) -> list[list[Tensor]]:
    """Makes three steps; returns weights, averages and numbers of steps after each."""
    kept = []
    for step, factor in enumerate((1.0, poison, 1.0)):
        batch = random_batch(lengths, engine.model.shape.vocabulary, step)
        batches = PretrainingBatches((batch,), len(batch.lengths), len(batch.labels))
        train_step(engine, batches, 1e-3, Seeds(step, step), lambda *given, by=factor: MLM.loss(*given) * by)
        states = [each for flat in engine.flat_tensors for each in engine.optimizer.get_state(flat.tensor).values()]
        kept.append([each.clone() for each in (*(weight for _, weight in engine.weights()), *states)])
    return kept
