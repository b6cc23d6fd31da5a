"""Those who fine-tune in the benchmark of speed: each in a process of its own, which works when it is its turn.

A turn is an epoch of training, or one prediction of the same items, so that all do the same work in every turn.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import trainer_peer
from data_prep.common.arrays import Array
from data_prep.common.launchers import World
from finetuning.inputs import Cutter, Encoded, Items
from finetuning.model.models import find_model
from finetuning.running.base import Base
from finetuning.running.loop import Tuner
from finetuning.running.outputs import outputs_of
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Setup, Task
from pretraining.engine.precision import set_arithmetic
from pretraining.processes.context import Context
from pretraining.processes.group import choose_device, connect, default_threads
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

SQUAD = "squad/train-v1.1_subset_44articles.json"


@dataclass(frozen=True)
class Work:
    """What everybody does: epochs of training on some items, and predictions of them."""

    task: str
    """sst2, cola or squad."""
    model: Path
    data: Path
    batch: int
    steps: int
    """Steps of an epoch."""
    epochs: int
    dtype: str = "auto"

    def settings(self) -> FineTuning:
        """Those of the task's recipe, without what is kept of a run."""
        given = {"batch": self.batch, "epochs": float(self.epochs), "precision.dtype": f'"{self.dtype}"'}
        quiet = {"logging.tensorboard": "false", "checkpoints.every": 0}
        overrides = [f"--{name}={value}" for name, value in {**given, **quiet}.items()]
        return load_settings("squad1" if self.task == "squad" else "glue", overrides)

    def open(self) -> Task:
        """The task, with as many of its training items as the steps of an epoch take."""
        cutter, settings = Cutter(find_model(str(self.model)).vocabulary), self.settings()
        task: Task = (
            open_squad("1.1", self.data / SQUAD, None, Setup(cutter, settings), held_out=0.1)
            if self.task == "squad"
            else open_glue(self.task, self.data / "glue", Setup(cutter, settings))
        )
        order = np.random.default_rng(0).permutation(len(task.train))
        task.train = Some(task.train, order[: self.steps * self.batch])
        return task


@dataclass(frozen=True)
class Some:
    """Some of the items of a split."""

    items: Items
    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    def encode(self, numbers: Array) -> Encoded:
        """The model's input of these items."""
        return self.items.encode(self.numbers[numbers])


class InTurns:
    """A loop of training as a side of a contest: a thread goes through it, and stands still between turns."""

    def __init__(self, work: Callable[[InTurns, Path], None]) -> None:
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        threading.Thread(target=self._go_through, args=(work,), daemon=True).start()
        self._wait()

    def __call__(self, _: object) -> None:
        """Lets it go on for a turn."""
        self._begin.release()
        self._wait()

    def next(self) -> None:
        """Ends a turn, and waits for the next one; the loop calls it, and once when it is ready for the first."""
        self._end.release()
        self._begin.acquire()

    def _wait(self) -> None:
        self._end.acquire()
        if self._error is not None:
            raise self._error

    def _go_through(self, work: Callable[[InTurns, Path], None]) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                work(self, Path(folder))
        except BaseException as error:
            self._error = error
            self._end.release()


class Uninterrupted(Control):
    """Hears no signals, of which Python tells the main thread alone."""

    @contextmanager
    def interruptible(self, *_: object) -> Iterator[None]:
        """Does nothing."""
        yield


class TurnedRun(Tuner):
    """Our run, an epoch in a turn."""

    turns: InTurns

    def after_step(self) -> None:
        """Does what is always done, and ends the turn with the epoch."""
        super().after_step()
        if self.state.step % self.batches.steps_per_epoch == 0:
            self.turns.next()

    def score_where_due(self) -> None:
        """Scores nothing: prediction has turns of its own."""


def ours(work: Work) -> InTurns:
    """Our fine-tuning."""

    def train(turns: InTurns, folder: Path) -> None:
        world, settings = World(), work.settings()
        device = choose_device("auto", world)
        connect(world, device)
        torch.set_num_threads(default_threads(world))
        set_arithmetic(settings.precision, settings.compute, device)
        task, base = work.open(), Base(find_model(str(work.model)))
        context = Context(world, device, Console(file=StringIO()), Uninterrupted(world), Watch(world))
        turns.next()
        run = TurnedRun(task, base.shape_for(settings.dropout), base.weights_for(task), settings, folder, context)
        run.turns = turns
        run.train(lambda *_: None)
        while True:
            outputs_of(run.engine, task.head.kind, {"train": task.train}, context)
            turns.next()

    return InTurns(train)


def theirs(numbers: trainer_peer.Numbers, width: int, work: Work) -> InTurns:
    """transformers' Trainer, which pads to a width, or to the longest of a batch with lengths grouped."""
    import transformers

    def train(turns: InTurns, folder: Path) -> None:
        class EndsTurns(transformers.TrainerCallback):
            """Ends a turn with the last step of an epoch."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
                if state.global_step % work.steps == 0:
                    turns.next()

        torch.set_num_threads(default_threads(World()))
        settings, callbacks = work.settings(), [EndsTurns()]
        trainer = trainer_peer.make_trainer(
            work.open(), work.model, folder, settings, numbers=numbers, width=width, callbacks=callbacks
        )
        turns.next()
        trainer.train()
        while True:
            trainer.predict(trainer.train_dataset)
            turns.next()

    return InTurns(train)
