"""Where a run begins: its model in an engine, with fresh weights for the head, or as a checkpoint has it all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from finetuning.model.features import FeatureModel
from finetuning.model.heads import TaskModel
from finetuning.results import ModelScores
from finetuning.scale import Scale
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.checkpoint.reading import newest_whole, restore_engine, restore_model
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.huggingface.weights import TaskHead
from pretraining.model.encoder import INITIAL_RANGE, Encoder
from pretraining.model.shape import Shape
from pretraining.processes.context import Context
from pretraining.reporting.meter import Meter

Weights = Mapping[str, Tensor]
"""Weights to begin with, by their names in the model."""


class TuningState(BaseModel):
    """Where a run stands, besides its engine."""

    step: int = 0
    seconds: float = 0.0
    """Seconds of logged steps, without evaluation and saving."""
    items: int = 0
    """Items of these steps, over all ranks."""
    best: float | None = None
    """The best score so far, by the metric of the task."""
    worse: int = 0
    """Evaluations since then."""
    scored: int = -1
    """The step after which dev was scored last."""
    kept: ModelScores = ModelScores()
    """The scores of the weights that are kept."""

    def as_json(self) -> dict[str, Any]:
        """The section of a checkpoint's record that says it."""
        return self.model_dump()


def find_start(
    task: Task, shape: Shape, weights: Weights, settings: FineTuning, folder: Path, context: Context
) -> tuple[Engine, Meter, TuningState]:
    """Makes the engine of a run with its model, as the newest checkpoint in the run's folder says, if there is one."""
    checkpoint = newest_whole(folder, context.warn)
    model = build_model(task.head, shape, weights, settings, fresh=checkpoint is None, scale=task.scale)
    if checkpoint is not None:
        restore_model(checkpoint, model)
    of_engine = EngineSettings(settings.optimizer, settings.precision, settings.parallel, settings.compute)
    engine = Engine(model, of_engine, context.device)
    meter, state = Meter(engine.device, ("loss",), ("labels", "items")), TuningState()
    if checkpoint is not None:
        record = restore_engine(checkpoint, engine)
        meter.restore(record.rank_states, context.world.rank, context.world.size)
        state = TuningState.model_validate(record.caller)
    return engine, meter, state


def build_model(
    head: TaskHead,
    shape: Shape,
    weights: Weights,
    settings: FineTuning,
    fresh: bool = True,
    scale: Scale | None = None,
) -> TaskModel | FeatureModel:
    """Makes the model for a task; a `fresh` one has the weights that are known, and draws the others by the seed."""
    if settings.features.layers:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            known = {**Encoder(shape).initialize(settings.seed).state_dict(), **weights}
            model = FeatureModel(shape, head, settings.features, known)
            nn.init.normal_(model.head.weight, std=INITIAL_RANGE)
        return model
    whole = TaskModel(shape, head, settings.compute.checkpoint_activations, scale).initialize(settings.seed)
    if fresh:
        whole.load_state_dict({**whole.state_dict(), **weights})
    return whole
