"""Two sides that learn the same and note every loss: our fine-tuning, and transformers' Trainer.

Both begin with the weights of one folder, the fresh head with them. The Trainer goes through our batches in our order,
has our settings and cuts off at our places, unless a difference says otherwise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.fine_tuners import Numbers, Unscored, arguments, load_model, rows_of
from data_prep.common.launchers import World
from finetuning.inputs import Cutter
from finetuning.model.models import find_model
from finetuning.running.base import Base
from finetuning.running.batches import TrainingBatches
from finetuning.running.loop import build_model
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.sentences import SentenceTask
from finetuning.tasks.task import Setup
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.folders import write_fine_tuned
from pretraining.huggingface.weights import Kind
from pretraining.processes.context import Context
from pretraining.processes.group import connect, disconnect
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

BATCH = 32
CPU = torch.device("cpu")
SAME = ("--precision.dtype", "fp32", "--warmup", "0", "--dropout.hidden", "0", "--dropout.attention", "0")
QUIET = ("--logging.every", "1", "--logging.tensorboard", "false", "--checkpoints.every", "0")
LAST = 10
"""Steps at the end whose mean losses are compared too: single ones depend on the items of a batch."""


@dataclass(frozen=True)
class Difference:
    """What the two sides do differently."""

    ours: tuple[str, ...] = ()
    """Settings of both sides, as a command gives them, which each follows in its own way."""
    ours_alone: tuple[str, ...] = ()
    """Settings that only our side has."""
    theirs: Mapping[str, Any] = field(default_factory=dict)
    """What the Trainer is told instead."""
    their_numbers: Numbers = "fp32"
    """What the Trainer computes in."""
    own_order: bool = False
    """Whether the Trainer draws its own order."""
    own_cut: bool = False
    """Whether transformers' tokenizer makes its sequences, of the texts themselves."""
    width: int = 0
    """What the Trainer pads to (default: the longest of a batch)."""
    raw_numbers: bool = False
    """Whether the Trainer learns numbers as they are given, and not with mean 0 and spread 1."""


DROPOUT = ("--dropout.hidden", "0.1", "--dropout.attention", "0.1")
DIFFERENCES = {
    "nothing": Difference(),
    "order: each draws its own": Difference(own_order=True),
    "dropout 0.1: each draws its own": Difference(ours=DROPOUT),
    "warm-up of 10%: their first step has a learning rate of 0": Difference(ours=("--warmup", "0.1")),
    "warm-up of 10% here, none there": Difference(ours=("--warmup", "0.1"), theirs={"warmup_steps": 0}),
    "decay 0.01 here, none there": Difference(theirs={"weight_decay": 0.0}),
    "epsilon 1e-6 here, 1e-8 there": Difference(theirs={"adam_epsilon": 1e-8}),
    "no bias correction here, as in BERT": Difference(ours_alone=("--optimizer.bias_correction", "false")),
    "clipping at 1 here, none there": Difference(theirs={"max_grad_norm": 0.0}),
    "cutting: by their tokenizer, at 128": Difference(own_cut=True),
    "cutting: by their tokenizer, at 64": Difference(ours=("--length", "64"), own_cut=True),
    "padding: to 128 there": Difference(width=128),
    "numbers: with mean 0 and spread 1 here": Difference(raw_numbers=True),
    "16 bits: bf16 here": Difference(ours_alone=("--precision.dtype", "bf16")),
    "16 bits: autocast there": Difference(their_numbers="autocast"),
}
"""What the sides differ in, by its name in the table; one thing at a time."""


def differences_of(kind: Kind) -> list[str]:
    """The names of the differences that there are for a kind of task: only numbers have a scale."""
    return [name for name, each in DIFFERENCES.items() if kind == "score" or not each.raw_numbers]


@dataclass(frozen=True)
class Trial:
    """One comparison: some steps of a task from one model, with one difference."""

    task_name: str
    model: Path
    data: Path
    steps: int
    learning_rate: float
    folder: Path
    """A folder for what is made on the way."""
    difference: Difference = field(default_factory=Difference)

    def settings(self, *own: str) -> FineTuning:
        """The settings of the recipe of GLUE, with what both sides share and what one has on its own."""
        given = ("--batch", str(BATCH), "--epochs", "1.0", "--learning_rate", str(self.learning_rate), *QUIET)
        return load_settings("glue", [*given, *SAME, *self.difference.ours, *own])

    @cached_property
    def task(self) -> SentenceTask:
        """The task, with as many of its items as the steps take, so that all batches are full."""
        setup = Setup(Cutter(find_model(str(self.model)).vocabulary), self.settings())
        task = open_glue(self.task_name, self.data / "glue", setup)
        chosen = np.random.default_rng(0).permutation(len(task.train))[: self.steps * BATCH]
        task.train = task.train.take(chosen)
        return task

    @property
    def texts(self) -> list[list[str]]:
        """The texts of its items: one column, or the two of pairs."""
        return [list(column) for column in self.task.train.texts]

    @cached_property
    def start(self) -> Path:
        """A folder of transformers with the weights that both begin with."""
        settings, model = self.settings(), find_model(str(self.model))
        weights = build_model(self.task.head, model.shape, Base(model).weights_for(self.task), settings).state_dict()
        start = Path(tempfile.mkdtemp(dir=self.folder)) / "start"
        write_fine_tuned(start, model.shape, self.task.head, weights, model.vocabulary, "", {}, settings.length)
        return start


Known = dict[tuple[str, ...], list[float]]
"""Losses of ours by the settings that a difference gives our side."""


def compared(trial: Trial, known: Known) -> dict[str, Any]:
    """How far the losses of both sides are apart: in the first step, in any, and in the mean of the last; what is
    `known` of ours from another difference is not computed again."""
    given = trial.difference.ours + trial.difference.ours_alone
    ours = known[given] = known.get(given) or our_losses(trial)
    theirs = their_losses(trial)
    assert len(ours) == len(theirs) == trial.steps
    if trial.difference.raw_numbers:
        ours = [loss * trial.task.scale.spread**2 for loss in ours]
    apart = np.abs(np.array(ours) - np.array(theirs))
    ends = {f"{side} last": float(np.mean(losses[-LAST:])) for side, losses in (("ours", ours), ("theirs", theirs))}
    found = {"first step": float(apart[0]), "at most": float(apart.max()), **ends}
    return {**found, "sequences that differ": count_unlike(trial)} if trial.difference.own_cut else found


def count_unlike(trial: Trial) -> int:
    """How many sequences the tokenizer of transformers makes otherwise than we do."""
    ours = trial.task.train.encode(np.arange(len(trial.task.train))).sequences.pieces
    theirs = their_tokenizer(trial)(*trial.texts, truncation=True, max_length=trial.settings().length)["input_ids"]
    return sum(ours.row(number).tolist() != made for number, made in enumerate(theirs))


class Noted(Unscored):
    """A run that notes its losses."""

    losses: list[float]

    def log_step(self) -> None:
        """Notes the mean loss of the step, of which every one is logged."""
        self.losses.append(self.meter.flush()[0]["loss"] / BATCH)


@contextmanager
def alone() -> Iterator[Context]:
    """The context of a run of one process."""
    world = World()
    connect(world, CPU)
    try:
        yield Context(world, CPU, Console(file=StringIO()), Control(world), Watch(world))
    finally:
        disconnect()


def our_losses(trial: Trial) -> list[float]:
    """The mean loss of every step of ours."""
    settings = trial.settings(*trial.difference.ours_alone)
    set_arithmetic(settings.precision, settings.compute, CPU)
    base = Base(find_model(str(trial.model)))
    with alone() as context, tempfile.TemporaryDirectory(dir=trial.folder) as folder:
        shape, weights = base.shape_for(settings.dropout), base.weights_for(trial.task)
        run = Noted(trial.task, shape, weights, settings, Path(folder), context)
        run.losses = []
        run.train(lambda *_: None)
        run.close()
    return run.losses


def their_losses(trial: Trial) -> list[float]:
    """The mean loss of every step of the Trainer."""
    import transformers

    losses: list[float] = []

    class NotedTrainer(transformers.Trainer):
        """A Trainer that notes its losses."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    difference, settings, tokenizer = trial.difference, trial.settings(), their_tokenizer(trial)
    told = arguments(settings, trial.folder / "trainer", difference.their_numbers, grouped=False, on_cpu=True)
    for name, value in difference.theirs.items():
        setattr(told, name, value)
    told.train_sampling_strategy = "random" if difference.own_order else "sequential"
    trainer = NotedTrainer(
        model=load_model(trial.start, trial.task.head, settings),
        args=told,
        train_dataset=their_rows(trial, tokenizer),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return losses


def their_tokenizer(trial: Trial) -> Any:
    """The tokenizer of the folder that both begin with."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(trial.start)


def their_rows(trial: Trial, tokenizer: Any) -> list[dict[str, Any]]:
    """The items as the Trainer takes them, in the order of our batches."""
    task, settings, difference = trial.task, trial.settings(), trial.difference
    rows = rows_of(task.train, task.head.kind, difference.width)
    if difference.own_cut:
        made = tokenizer(*trial.texts, truncation=True, max_length=settings.length)
        rows = [{**row, **{name: made[name][number] for name in made}} for number, row in enumerate(rows)]
    if task.head.kind == "score":
        for row in rows:
            given = torch.tensor(row["labels"])
            row["labels"] = float(given if difference.raw_numbers else task.scale.learned(given))
    ours = islice(TrainingBatches(task.train, settings).iterate(0), trial.steps)
    order = [number for step, _ in ours for batch in step.micro for number in batch.examples[:, 0].tolist()]
    return [rows[number] for number in order]
