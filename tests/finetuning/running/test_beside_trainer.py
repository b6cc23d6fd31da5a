"""Our fine-tuning has the losses of transformers' Trainer step by step, from one folder of weights by the same
settings."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.fine_tuning import make_model
from benchmarks.finetuning_sides import UnscoredTuner, build_arguments, encode_rows, make_trainer, open_context
from finetuning.inputs import Cutter
from finetuning.running.base import Base, Run, find_model
from finetuning.running.batches import TrainingBatches
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.sentences import SentenceTask
from finetuning.tasks.task import Setup
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.folders import write_fine_tuned
from pretraining.model.batch import CPU

pytest.importorskip("accelerate")
BATCH = 32
FP32 = f"--precision.dtype fp32 --batch {BATCH} --logging.tensorboard false --checkpoints.every 0".split()
NOTHING_DRAWN = "--warmup 0 --dropout.hidden 0 --dropout.attention 0 --logging.every 1".split()


@dataclass(frozen=True)
class Trial:
    """Some steps of a task of GLUE, without dropout and warm-up, which the two sides compute differently."""

    task_name: str
    data: Path
    steps: int
    folder: Path
    """A folder for what is made on the way."""

    @cached_property
    def model(self) -> Path:
        """A model that both sides begin with."""
        return make_model("tiny", self.folder / "tiny")

    @cached_property
    def settings(self) -> FineTuning:
        """The settings of the recipe of GLUE, which both sides follow."""
        return load_settings("glue", [*FP32, *NOTHING_DRAWN, "--epochs", "1.0", "--learning_rate", "1e-3"])

    @cached_property
    def task(self) -> SentenceTask:
        """The task, with as many of its items as the steps take, so that all batches are full."""
        setup = Setup(Cutter(find_model(str(self.model)).vocabulary), self.settings)
        task = open_glue(self.task_name, self.data / "glue", setup)
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

    def train_ours(self) -> list[float]:
        """Trains by our loop; returns the mean loss of every step."""
        set_arithmetic(self.settings.precision, self.settings.compute, CPU)
        with open_context(CPU) as context:
            run = NotedRun(Run(self.task, self.settings, self.folder), Base(find_model(str(self.model))), context)
            run.losses = []
            run.train()
            run.close()
        return run.losses

    def train_theirs(self, own_order: bool = False) -> list[float]:
        """Trains by the Trainer, on our batches or in an order of its own; returns the mean loss of every step."""
        losses: list[float] = []

        class NotedTrainer(transformers.Trainer):  # type: ignore[misc]
            """A Trainer that notes its losses."""

            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss: torch.Tensor = super().training_step(*args, **kwargs)
                losses.append(float(loss))
                return loss

        told = build_arguments(self.settings, self.folder / "trainer", "fp32", grouped=False, on_cpu=True)
        told.train_sampling_strategy = "random" if own_order else "sequential"
        make_trainer(NotedTrainer, self.start, self.task.head, self.settings, told, self.list_rows()).train()
        return losses

    def list_rows(self) -> list[dict[str, Any]]:
        """The items as the Trainer takes them, in the order of our batches, with numbers on the scale of training."""
        rows = encode_rows(self.task.train, self.task.head.kind)
        for row in rows if self.task.head.kind == "score" else ():
            row["labels"] = float(self.task.scale.standardize(torch.tensor(row["labels"])))
        ours = islice(TrainingBatches(self.task.train, self.settings).iterate(0), self.steps)
        return [rows[number] for step, _ in ours for batch in step.micro for number in batch.examples[:, 0].tolist()]


class NotedRun(UnscoredTuner):
    """A run that notes its losses."""

    losses: list[float]

    def log_step(self) -> None:
        """Notes the mean loss of the step; every step is logged."""
        self.losses.append(self.meter.flush()[0]["loss"] / BATCH)


def find_difference(one: list[float], other: list[float], steps: int) -> float:
    """The largest of all steps."""
    assert len(one) == len(other) == steps
    return float(np.abs(np.array(one) - np.array(other)).max())


def write_easy_task(folder: Path) -> Path:
    """A task of two classes that one word tells apart, and their lengths too."""
    place = folder / "glue" / "SST-2"
    place.mkdir(parents=True)
    rows = [f"the {'water' if number % 2 else 'man'} of {number}\t{number % 2}\n" for number in range(320)]
    for name, some in (("train", rows), ("dev", rows[:64])):
        (place / f"{name}.tsv").write_text("".join(["sentence\tlabel\n", *some]))
    return folder


@pytest.mark.slow
def test_the_same_batches_have_the_same_losses_and_others_have_others(tmp_path: Path) -> None:
    trial = Trial("sst2", write_easy_task(tmp_path / "data"), 4, tmp_path)
    ours = trial.train_ours()
    assert find_difference(ours, trial.train_theirs(), 4) < 1e-5
    assert find_difference(ours, trial.train_theirs(own_order=True), 4) > 1e-4


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("task", ["rte", "stsb"])
def test_fifty_steps_have_the_losses_of_the_trainer(task: str, real_data: Path, tmp_path: Path) -> None:
    trial = Trial(task, real_data, 50, tmp_path)
    assert find_difference(trial.train_ours(), trial.train_theirs(), 50) < 1e-5
