"""Gradients of word embeddings as rows: every optimizer makes the same steps as with all of the table's."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.base_models import MNLI, task_weights
from support.marks import slow
from support.processes import spawn
from support.training import connect_ranks
from support.transformers_models import SHAPE

from finetuning.inputs import Encoded, Ragged, Sequences
from finetuning.model.heads import TaskBatch, TaskModel
from finetuning.running.batches import pack
from pretraining.config.settings import Optimizer, Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.model import fused
from pretraining.optimizers.declaration import optimizers
from pretraining.processes.group import disconnect

STEPS, DTYPES = 4, ("fp32", "bf16")


def batch_of(step: int) -> TaskBatch:
    """Texts of this rank in a step, of few words, of which some come again in the next step."""
    random = np.random.default_rng([dist.get_rank(), step])
    pieces = Ragged.from_rows([random.integers(5 * step, 5 * step + 9, size).astype(np.int32) for size in (7, 4, 12)])
    labels = Ragged(random.integers(0, 3, 3), np.arange(1, 4))
    return pack(Encoded(Sequences(pieces, pieces.lengths), labels), np.arange(3))


def trained(name: str, dtype: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The norms of the gradients of some steps, and the weights after them."""
    model: Any = TaskModel(SHAPE, MNLI)
    model.load_state_dict(task_weights(MNLI))
    settings = EngineSettings(Optimizer(name=name), Precision(dtype=dtype), Parallel(zero=1))
    engine, norms = Engine(model, settings, torch.device("cpu")), []
    for step in range(STEPS):
        engine.backward(engine.forward(batch_of(step)).loss, last=True)
        engine.step(1e-2)
        norms.append(float(engine.gradient_norm or 0))
    return norms, [weight.clone() for _, weight in engine.weights()]


def on_ranks() -> dict[str, Any]:
    connect_ranks()
    found: dict[str, Any] = {}
    for way, attribute in (("rows", fused.TAKES_ROWS), ("table", "another")):
        vars(fused)["TAKES_ROWS"] = attribute
        for name, dtype in product(optimizers(), DTYPES):
            found[f"{way} {name} {dtype}"] = trained(name, dtype)
    disconnect()
    return found


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_every_optimizer_makes_the_same_steps(ranks: int) -> None:
    done = spawn(ranks, on_ranks, timeout=150)
    assert [(rank.code, rank.errors) for rank in done] == [(0, "")] * ranks
    for found, name, dtype in product((rank.result for rank in done), optimizers(), DTYPES):
        (norms, weights), (wanted, right) = (found[f"{way} {name} {dtype}"] for way in ("rows", "table"))
        assert norms == pytest.approx(wanted, rel=1e-6), (name, dtype)
        assert len(set(norms)) == STEPS
        for weight, whole in zip(weights, right, strict=True):
            torch.testing.assert_close(weight, whole, rtol=1e-6, atol=1e-7)
