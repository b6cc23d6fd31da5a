"""One step of training, as whoever trains anything calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import twice
from support.marks import slow
from support.pretraining_reference import SMALL, random_batch
from support.processes import ROOT, run_program
from support.training import run_connected
from torch import Tensor, nn

from pretraining.config.settings import Parallel, Precision
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import Batch, StepBatches
from pretraining.model.encoder import Encoder


class Scores(NamedTuple):
    """What the classifier makes of a batch."""

    logits: Tensor
    labels: Tensor


class Classifier(Encoder):
    """An encoder with a head of its own, as fine-tuning has it: whether a sequence begins with a large number."""

    def __init__(self) -> None:
        super().__init__(SMALL)
        self.head = nn.Linear(SMALL.hidden, 2)

    def forward(self, batch: Batch) -> Scores:
        labels = (batch.pieces[batch.starts[:-1].long()] > SMALL.vocabulary // 2).long()
        return Scores(self.head(self.sequence_states(self.encode(batch), batch)), labels)


def classification_loss(scores: Scores, batches: StepBatches[Batch]) -> Tensor:
    return F.cross_entropy(scores.logits.float(), scores.labels, reduction="sum") / batches.sequences


def train_classifier() -> tuple[list[float], bool]:
    """Losses of some steps on two ranks of two micro-batches, and whether a step with the same seeds repeats them."""
    rank = dist.get_rank()
    settings = EngineSettings(precision=Precision(dtype="fp32"), parallel=Parallel(zero=2))
    engine = Engine(Classifier().initialize(3), settings, torch.device("cpu"))
    losses = []
    for step in range(12):
        micro = tuple(random_batch((9, 17, 5), SMALL.vocabulary, seed=10 * rank + part) for part in range(2))
        batches = StepBatches[Batch](micro, sequences=12)
        result = train_step(engine, batches, 2e-3, Seeds.derive(1, step, rank), classification_loss)
        losses.append(float(sum(result.losses)))
        assert all(not part.requires_grad for output in result.outputs for part in output)
    engine.close()
    return losses, Seeds.derive(1, 2, 0) == Seeds.derive(1, 2, 0) != Seeds.derive(1, 2, 1)


def test_a_model_with_a_head_of_its_own_learns_by_the_same_step() -> None:
    for losses, seeds_are_right in run_connected(2, train_classifier):
        assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
        assert seeds_are_right


def test_every_step_drops_other_elements_and_every_rank_draws_others() -> None:
    found = [Seeds.derive(seed, step, rank) for seed in (1, 2) for step in range(9) for rank in range(3)]
    assert len({seeds.generator for seeds in found}) == 2 * 9 * 3
    assert len({seeds.dropout for seeds in found}) == 2 * 9, "a mask is of an example, on whichever rank"


def test_what_fine_tuning_stands_on_needs_neither_training_nor_its_data() -> None:
    wings = "engine.step checkpoint.reading checkpoint.writing huggingface.folders reporting.run_log processes.watchdog"
    code = f"import sys, {', '.join(f'pretraining.{name}' for name in wings.split())}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not [name for name in done.stdout.split() if name.startswith(("pretraining.training", "pretraining.data"))]


@pytest.mark.parametrize("optimizer", [slow("adamw"), "lamb"])
def test_a_run_gives_the_same_bits_twice(optimizer: str, tmp_path: Path) -> None:
    """By the program that tests of GPUs start."""
    done = run_program(twice.__file__, ["cpu", "fp32", optimizer], tmp_path)
    assert (done.output.split(), done.errors) == (["True", "True"], "")
