"""Our loop learns as transformers does: the same weights, data and order give the same losses, step by step.

Not only the model takes part, but what the Trainer does around it: AdamW, decay, clipping, warm-up, linear decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from support.pretraining_reference import their_config
from support.transformers_models import SHAPE
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.launchers import World
from finetuning.inputs import Encoded, Sequences
from finetuning.model.heads import TaskBatch
from finetuning.ragged import Ragged
from finetuning.running.batches import TaskBatches, TrainingBatches
from finetuning.running.loop import Tuner
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.sentences import SentenceTask
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.folders import read_fine_tuned
from pretraining.huggingface.weights import TaskHead
from pretraining.processes.context import Context
from pretraining.processes.group import connect, disconnect
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

STEPS, BATCH, LENGTH, SECOND = 14, 4, 12, 7
CPU = torch.device("cpu")
HEADS = {"classes": TaskHead("classes", ("a", "b", "c")), "spans": TaskHead("spans")}
SETTINGS = [
    *("--precision.dtype", "fp32", "--batch", str(BATCH), "--epochs", "2.0", "--learning_rate", "2e-3"),
    *("--warmup", "0.25", "--dropout.hidden", "0.0", "--dropout.attention", "0.0", "--optimizer.clip", "0.5"),
    *("--logging.every", "1", "--logging.tensorboard", "false", "--checkpoints.every", "0"),
]


class Made:
    """Drawn items of one length, so that padding, which transformers lets take part in spans, cannot matter."""

    def __init__(self, kind: str) -> None:
        random, count = np.random.default_rng(0), STEPS // 2 * BATCH
        self.pieces = random.integers(1, SHAPE.vocabulary, (count, LENGTH)).astype(np.int32)  # 0 is never trained
        spans = np.sort(random.integers(0, LENGTH, (count, 2)))
        self.labels: Array = spans if kind == "spans" else self.pieces[:, :1].astype(np.int64) % 3

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, numbers: Array) -> Encoded:
        sequences = Sequences(Ragged.from_table(self.pieces[numbers]), np.full(len(numbers), SECOND))
        return Encoded(sequences, Ragged.from_table(self.labels[numbers]))


class NotedRun(Tuner):
    """A run that notes its losses, and scores nothing."""

    losses: list[float]

    def log_step(self) -> None:
        self.losses.append(float(self.meter.flush()[0]["loss"]))

    def score_where_due(self) -> None:
        pass


@pytest.fixture
def context() -> Iterator[Context]:
    world = World()
    connect(world, CPU)
    yield Context(world, CPU, Console(file=StringIO()), Control(world), Watch(world))
    disconnect()


def ours(items: Made, model: Path, settings: FineTuning, folder: Path, context: Context) -> list[float]:
    """The mean loss of every step of our loop."""
    shape, head, weights = read_fine_tuned(model)
    assert head is not None
    folder.mkdir()
    task = SentenceTask("made", head, "accuracy", ("accuracy",), ("text",), {"train": items})  # type: ignore[dict-item]
    set_arithmetic(settings.precision, settings.compute, CPU)
    shape = replace(shape, dropout=0.0, attention_dropout=0.0)
    run = NotedRun(task, shape, weights, settings, folder, context)
    run.losses = []
    run.train(lambda *_: None)
    return [loss / (BATCH * items.labels.shape[1]) for loss in run.losses]


def as_theirs(batch: TaskBatch, kind: str) -> dict[str, Tensor]:
    """A batch of ours as transformers takes it."""
    assert batch.labels is not None
    given = {"input_ids": batch.pieces.view(-1, LENGTH), "token_type_ids": batch.segments.view(-1, LENGTH)}
    if kind == "classes":
        return {**given, "labels": batch.labels}
    first, last = batch.labels.view(-1, 2).T
    return {**given, "start_positions": first, "end_positions": last}


def theirs(model: Any, batches: list[TaskBatches], settings: FineTuning, kind: str) -> list[float]:
    """The loss of every step of transformers' model, with the optimizer and schedule that its Trainer would make."""
    given = settings.optimizer
    decayed = [weight for name, weight in model.named_parameters() if "bias" not in name and "LayerNorm" not in name]
    others = [weight for name, weight in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    groups = [{"params": decayed, "weight_decay": given.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=given.betas, eps=given.epsilon)
    warmup, losses = round(settings.warmup * STEPS), []
    for step, made in enumerate(batches):
        # as transformers' linear schedule, but our warm-up ends its first step above 0
        share = (step + 1) / warmup if step < warmup else (STEPS - step) / (STEPS - warmup)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * share
        loss = model(**as_theirs(made.micro[0], kind)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("kind", HEADS)
def test_the_losses_of_a_whole_run_are_those_of_transformers(kind: str, tmp_path: Path, context: Context) -> None:
    head, settings, items = HEADS[kind], load_settings("own", SETTINGS), Made(kind)
    named = {"id2label": dict(enumerate(head.labels)), "num_labels": 3} if head.labels else {}
    torch.manual_seed(0)
    config = their_config(replace(SHAPE, dropout=0.0, attention_dropout=0.0), **named)
    model = getattr(transformers, head.architecture)(config).train()
    model.save_pretrained(tmp_path / "model")
    batches = [step for step, _ in islice(TrainingBatches(items, settings).iterate(0), STEPS)]
    assert len(batches) == STEPS
    found = ours(items, tmp_path / "model", settings, tmp_path / "run", context)
    expected = theirs(model, batches, settings, kind)
    assert max(expected) - min(expected) > 0.1, "nothing was learned that could differ"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
