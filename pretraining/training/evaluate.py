"""Scores on the examples held out from training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pretraining.data.batches import validation_batches
from pretraining.data.dataset import Dataset
from pretraining.engine.engine import Engine
from pretraining.engine.step import GivenUpError
from pretraining.objectives.declaration import COUNTS, find_objective
from pretraining.reporting.records import EvaluationRecord


@torch.no_grad()
def evaluate(
    engine: Engine,
    dataset: Dataset,
    *,
    micro_batch: int,
    limit: int | None,
    step: int,
    phase: int,
    mark: Callable[[], None] = lambda: None,
    gives_up: Callable[[], bool] = lambda: False,
) -> EvaluationRecord:
    """Scores every example once, over all ranks; the result does not depend on their number but for rounding.

    Before each batch `gives_up` is asked, which must say the same on all ranks; where it says yes, GivenUpError is
    raised.
    """
    begin = time.perf_counter()
    engine.deepspeed.eval()
    objective = find_objective(engine.model.shape)
    names = (*objective.sums(engine.model.shape), *COUNTS)
    found = torch.zeros(len(names), dtype=torch.float64, device=engine.device)
    for batch, counts in validation_batches(dataset, dist.get_rank(), dist.get_world_size(), micro_batch, limit):
        mark()
        if gives_up():
            raise GivenUpError
        losses = engine.forward(batch.to(engine.device))
        sizes = torch.tensor([len(batch.labels), len(batch.lengths)], dtype=torch.float64)
        found += torch.cat([torch.stack([loss.double() for loss in losses]), sizes.to(engine.device)]) * counts
    engine.deepspeed.train()
    dist.all_reduce(found)
    totals = dict(zip(names, found.tolist(), strict=True))
    figures = objective.score(objective.measure(totals))
    return EvaluationRecord(
        step=step,
        phase=phase,
        learns=figures,
        said=objective.said(figures),
        scored_examples=int(totals["sequences"]),
        evaluation_seconds=time.perf_counter() - begin,
    )
