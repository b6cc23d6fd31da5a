"""Small models that ranks share, trained for some steps on the same batches by any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.optimizer_reference import read_ratios
from support.pretraining_reference import SMALL, make_uneven, random_rows
from torch import Tensor

from data_prep.common.hashing import hash_key
from pretraining.architectures.declaration import find_architecture
from pretraining.checkpoint.reading import restore_engine, restore_model
from pretraining.config.settings import Compute, Optimizer, Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import PretrainingBatches
from pretraining.model.rows import Draw
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Objective, build_model, configure_objective, objectives
from pretraining.optimizers.steps.lamb import Lamb

LENGTHS = [(20, 31, 9, 16), (12, 40, 5, 8)]
"""The lengths of the sequences of each of two data ranks."""
STEPS = 5
BOUNDARY = (256, 255, 256)
"""Labels at the boundary of the shares that two ranks have of `Case.vocabulary`."""
EPSILON, STRETCH = 1e6, 1000.0
PLAIN_DESCENT: dict[str, Any] = {"name": "adamw", "betas": (0.0, 0.0), "epsilon": EPSILON, "weight_decay": 0.0}
"""With these, a step of AdamW is the gradient times the learning rate by EPSILON; STRETCH times the gradient moves
weights so far that what their rounding hides does not matter."""


@dataclass(frozen=True)
class Case:
    """A model and the way in which it is trained."""

    architecture: str = "bert"
    objective: str = "mlm"
    optimizer: str = "adamw"
    zero: int = 1
    dtype: str = "fp32"
    heads: int = 4
    recompute: bool = False
    vocabulary: int = 301

    @property
    def shape(self) -> Shape:
        """Sizes whose vocabulary has pieces in the shares of two ranks; for modern, heads of an even width."""
        kind = find_architecture(self.architecture)
        names = ("layers", "hidden", "intermediate", "positions")
        given = {**kind.defaults, **{name: getattr(SMALL, name) for name in names}}
        given |= {"architecture": self.architecture, "heads": self.heads, "dropout": 0.1, "attention_dropout": 0.1}
        shape = kind.settings_type(**given).shape(self.vocabulary)
        return replace(shape, learns=self.settings.learning(kind.learns_pairs(shape)))

    @property
    def settings(self) -> Objective:
        """The objective, by which half of the sequences are read left to right where some are."""
        settings = objectives()[self.objective].settings_type
        more = {"causal_share": 0.5} if "causal_share" in settings.model_fields else {}
        return configure_objective(settings(name=self.objective, **more))

    def batches(self, step: int, data_rank: int, data_ranks: int) -> PretrainingBatches:
        """Makes the batches of a step for a data rank: one of `LENGTHS` each, or both one after the other."""
        micro = []
        for number, lengths in enumerate(LENGTHS):
            rows = random_rows(lengths, self.vocabulary, seed=10 * step + number, first=10 * number)
            rows.labels[: len(BOUNDARY)] = BOUNDARY
            keys = np.sort(hash_key(step, np.arange(len(lengths)) + 10 * number))
            if (one_way := self.settings.draw_one_way(keys)) is not None:
                keys = keys[np.argsort(~one_way, kind="stable")]
            micro.append(self.settings.batch(rows, Draw(keys, 0.0, self.vocabulary, 1, 2)))
        own, predictions = tuple(micro[data_rank::data_ranks]), sum(len(each.labels) for each in micro)
        following = sum(sum(each.lengths[: each.one_way]) - each.one_way for each in micro)
        one_ways = sum(each.one_way for each in micro)
        return PretrainingBatches(own, sum(map(len, LENGTHS)), predictions, 0, following, one_ways)


@dataclass(frozen=True)
class Found:
    """What some steps of training found."""

    gradients: dict[str, Tensor]
    """of the first step, before clipping"""
    steps: list[dict[str, float]]
    """the numbers of each step"""
    ratios: dict[str, float]
    """the trust ratios of the last step, by LAMB"""

    def measure_distance(self, wanted: Found) -> dict[str, float]:
        """Measures how far it is from what was wanted: of the gradients of all weights together, relative; of the
        numbers of steps, the largest relative distance."""
        assert self.gradients.keys() == wanted.gradients.keys()
        apart = sum(float((self.gradients[name] - each).square().sum()) for name, each in wanted.gradients.items())
        whole = sum(float(each.square().sum()) for each in wanted.gradients.values())
        numbers = {
            name: max(abs(ours[name] / theirs[name] - 1) for ours, theirs in zip(self.steps, wanted.steps, strict=True))
            for name in ("loss", "norm")
        }
        right = [ours["right"] - theirs["right"] for ours, theirs in zip(self.steps, wanted.steps, strict=True)]
        ratios = [abs(self.ratios[name] / ratio - 1) for name, ratio in wanted.ratios.items()]
        numbers |= {"right": max(map(abs, right)), "ratios": max(ratios, default=0.0)}
        return {"gradients": math.sqrt(apart / whole), **numbers}


def count_right(output: Any) -> float:
    """Counts the right predictions of pieces among the sums of a batch."""
    return sum(float(getattr(output, name, 0.0)) for name in ("masked_correct", "correct"))


def make_engine(case: Case, tensor: int, checkpoint: Path | None = None, **optimizer: object) -> Engine:
    """Makes the engine of a model, which so many ranks share, with the state of a checkpoint if one is given."""
    settings = EngineSettings(
        Optimizer.model_validate(optimizer),
        Precision.model_validate({"dtype": case.dtype}),
        Parallel.model_validate({"zero": case.zero, "tensor": tensor}),
        Compute.model_validate({"checkpoint_activations": case.recompute}),
    )
    model = make_uneven(build_model(case.shape, case.recompute))
    if checkpoint is not None:
        restore_model(checkpoint, model)
    engine = Engine(model, settings, torch.device("cpu"))
    if checkpoint is not None:
        restore_engine(checkpoint, engine)
    return engine


def take_step(case: Case, engine: Engine, step: int, learning_rate: float) -> dict[str, float]:
    """Makes a step; returns the loss, the number of right predictions, and the norm of the gradient."""
    mesh = engine.mesh
    batches = case.batches(step, mesh.data_rank, mesh.data_ranks)
    result = train_step(engine, batches, learning_rate, Seeds.derive(3, step, dist.get_rank()), case.settings.loss)
    sums = [float(sum(result.losses)), sum(count_right(each) for each in result.outputs)]
    totals = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(totals, group=mesh.data_group)
    return {"loss": float(totals[0]), "right": float(totals[1]), "norm": float(engine.gradient_norm or 0.0)}


def collect_weights(engine: Engine) -> dict[str, Tensor]:
    """Copies all weights, whole."""
    return {name: weight.clone() for name, weight in engine.weights()}


def find_gradients(case: Case, tensor: int) -> dict[str, Tensor]:
    """Finds the gradients of the first step, as an engine moves weights by them."""
    engine = make_engine(replace(case, optimizer="adamw"), tensor, clip=0.0, **PLAIN_DESCENT)
    before = collect_weights(engine)
    take_step(case, engine, 0, STRETCH * EPSILON)
    after = collect_weights(engine)
    engine.close()
    return {name: (before[name] - after[name]) / STRETCH for name in before}


def train(case: Case, tensor: int, steps: int = STEPS) -> Found:
    """Trains a model on the connected ranks, `tensor` of which share one; returns what this rank found."""
    gradients = find_gradients(case, tensor)
    engine = make_engine(case, tensor, name=case.optimizer, clip=0.5)
    numbers = [take_step(case, engine, step, 1e-3) for step in range(steps)]
    ratios = read_ratios(engine.optimizer) if isinstance(engine.optimizer, Lamb) else {}
    engine.close()
    return Found(gradients, numbers, ratios)
