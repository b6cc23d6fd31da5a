"""Fine-tunes a BERT in fp32 by our loop and by transformers' Trainer, from one folder of weights, by the same settings:
`our_losses` and `their_losses` return the loss of every step of the same batches.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fine_tuning import UnscoredTuner, build_arguments, encode_rows, make_trainer, open_context
from benchmarks.fine_tuning_scores import open_task, standardize_labels
from finetuning.running.base import Base, Run, find_model
from finetuning.running.batches import TrainingBatches
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.sentences import SentenceTask
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.folders import write_fine_tuned
from pretraining.model.batch import CPU

BATCH = 32
FP32 = (
    "--precision.dtype",
    "fp32",
    "--batch",
    str(BATCH),
    "--logging.tensorboard",
    "false",
    "--checkpoints.every",
    "0",
)
NOTHING_DRAWN = ("--warmup", "0", "--dropout.hidden", "0", "--dropout.attention", "0", "--logging.every", "1")


@dataclass(frozen=True)
class Trial:
    """Some steps of a task of GLUE, without dropout and warm-up, which the two sides compute differently."""

    task_name: str
    model: Path
    data: Path
    steps: int
    folder: Path
    """A folder for what is made on the way."""

    @cached_property
    def settings(self) -> FineTuning:
        """The settings of the recipe of GLUE, which both sides follow."""
        return load_settings("glue", [*FP32, *NOTHING_DRAWN, "--epochs", "1.0", "--learning_rate", "1e-3"])

    @cached_property
    def task(self) -> SentenceTask:
        """The task, with as many of its items as the steps take, so that all batches are full."""
        task = open_task(self.task_name, self.data, self.model, self.settings)
        task.train = task.train.take(np.random.default_rng(0).permutation(len(task.train))[: self.steps * BATCH])
        return task

    @cached_property
    def start(self) -> Path:
        """A folder of transformers with the weights that both begin with, the head among them."""
        model, head = find_model(str(self.model)), self.task.head
        weights = Base(model).build_model(head, self.settings).state_dict()
        start = self.folder / "start"
        write_fine_tuned(start, model.shape, head, weights, model.vocabulary, "", {}, self.settings.length)
        return start


class NotedRun(UnscoredTuner):
    """A run that notes its losses."""

    losses: list[float]

    def log_step(self) -> None:
        """Notes the mean loss of the step; every step is logged."""
        self.losses.append(self.meter.flush()[0]["loss"] / BATCH)


def our_losses(trial: Trial) -> list[float]:
    """The mean loss of every step of ours."""
    set_arithmetic(trial.settings.precision, trial.settings.compute, CPU)
    base = Base(find_model(str(trial.model)))
    with open_context(CPU) as context, tempfile.TemporaryDirectory() as folder:
        run = NotedRun(Run(trial.task, trial.settings, Path(folder)), base, context)
        run.losses = []
        run.train()
        run.close()
    return run.losses


def their_losses(trial: Trial, own_order: bool = False) -> list[float]:
    """The mean loss of every step of the Trainer, on our batches or in an order of its own."""
    import transformers

    losses: list[float] = []

    class NotedTrainer(transformers.Trainer):  # type: ignore[misc]
        """A Trainer that notes its losses."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    told = build_arguments(trial.settings, trial.folder / "trainer", "fp32", grouped=False, on_cpu=True)
    told.train_sampling_strategy = "random" if own_order else "sequential"
    rows = their_rows(trial)
    make_trainer(NotedTrainer, trial.start, trial.task.head, trial.settings, told, rows).train()
    return losses


def their_rows(trial: Trial) -> list[dict[str, Any]]:
    """The items as the Trainer takes them, in the order of our batches, with numbers on the scale of the training."""
    task = trial.task
    rows = encode_rows(task.train, task.head.kind)
    standardize_labels(task, rows)
    ours = islice(TrainingBatches(task.train, trial.settings).iterate(0), trial.steps)
    return [rows[number] for step, _ in ours for batch in step.micro for number in batch.examples[:, 0].tolist()]
