"""Those who fine-tune in the benchmark of speed: each in a process of its own, which works when it is its turn.

A turn is an epoch of training, or one prediction of the same items, so that all do the same work in every turn.
Between turns a process is stopped as a whole: what it might prepare meanwhile would cost the others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import trainer_peer
from benchmarks.sides import hear, prepared_environment
from data_prep.common.arrays import Array
from finetuning.inputs import Cutter, Encoded, Items
from finetuning.model.models import find_model
from finetuning.running.base import Base
from finetuning.running.loop import Run
from finetuning.running.outputs import outputs_of
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Task
from pretraining.engine.precision import set_arithmetic
from pretraining.processes.context import Context
from pretraining.processes.environment import prepare_process
from pretraining.processes.group import choose_device, connect
from pretraining.processes.launchers import World
from pretraining.processes.outliving import end_with_parent
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

CORES = 2
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
            open_squad("1.1", self.data / SQUAD, None, cutter, settings, held_out=0.1)
            if self.task == "squad"
            else open_glue(self.task, self.data / "glue", cutter, settings)
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


class Turns:
    """A side's end of the pipe on which it hears when it may work."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._begin = pipe, 0.0

    def first(self) -> None:
        """Waits for the first turn."""
        self._pipe.send("ready")
        self._wait()

    def next(self) -> None:
        """Ends a turn, and waits for the next one."""
        self._pipe.send(time.perf_counter() - self._begin)
        self._wait()

    def _wait(self) -> None:
        self._pipe.recv()
        self._begin = time.perf_counter()


class TurnedRun(Run):
    """Our run, an epoch in a turn."""

    turns: Turns

    def after_step(self) -> None:
        """Does what is always done, and ends the turn with the epoch."""
        super().after_step()
        if self.state.step % self.batches.steps_per_epoch == 0:
            self.turns.next()

    def score_where_due(self) -> None:
        """Scores nothing: prediction has turns of its own."""


def ours(turns: Turns, work: Work, folder: Path, world: World) -> None:
    """Our fine-tuning, in one process or as one rank of two."""
    device, settings = choose_device("auto", world), work.settings()
    connect(world, device)
    torch.set_num_threads(max(1, CORES // world.size))
    set_arithmetic(settings.precision, settings.compute, device)
    task, model = work.open(), find_model(str(work.model))
    context = Context(world, device, Console(file=StringIO()), Control(world), Watch(world))
    base = Base(model)
    turns.first()
    run = TurnedRun(task, base.shape_for(settings.dropout), base.weights_for(task), settings, folder, context)
    run.turns = turns
    run.train(lambda *_: None)
    while True:
        outputs_of(run.engine, task.head.kind, {"train": task.train}, context)
        turns.next()


def theirs(turns: Turns, work: Work, folder: Path, numbers: trainer_peer.Numbers, width: int) -> None:
    """transformers' Trainer, in one process."""
    import transformers

    class EndsTurns(transformers.TrainerCallback):
        """Ends a turn with the last step of an epoch."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step % work.steps == 0:
                turns.next()

    torch.set_num_threads(CORES)
    task = work.open()
    trainer = trainer_peer.make_trainer(
        task, work.model, folder, work.settings(), numbers=numbers, width=width, callbacks=[EndsTurns()]
    )
    turns.first()
    trainer.train()
    while True:
        trainer.predict(trainer.train_dataset)
        turns.next()


@dataclass(frozen=True)
class Entrant:
    """Who takes part."""

    name: str
    ranks: int = 1
    numbers: trainer_peer.Numbers | None = None
    """What transformers computes in; None: it is us."""
    width: int = 0
    """What transformers pads to; 0: the longest of a batch, with lengths grouped."""


def take_part(entrant: Entrant, work: Work, rank: int, port: int, pipe: Connection) -> None:
    """The whole of a process, which may be stopped when the one that gives the turns is killed."""
    end_with_parent(signal.SIGKILL)
    turns = Turns(pipe)
    with tempfile.TemporaryDirectory() as folder:
        if entrant.numbers:
            theirs(turns, work, Path(folder), entrant.numbers, entrant.width)
            return
        prepare_process(small_steps=True)
        world = World(rank, entrant.ranks, rank, entrant.ranks, port=port, launcher="torchrun") if port else World()
        ours(turns, work, Path(folder), world)


class Side:
    """The processes of an entrant, as those see them who give the turns."""

    def __init__(self, entrant: Entrant, work: Work) -> None:
        self.name = entrant.name
        self._pipes, self._processes = [], []
        context, port = multiprocessing.get_context("spawn"), free_port() if entrant.ranks > 1 else 0
        for rank in range(entrant.ranks):
            ours, its = context.Pipe()
            process = context.Process(target=partial(take_part, entrant, work, rank, port, its), daemon=True)
            with prepared_environment(entrant.numbers is None, small_steps=True):
                process.start()
            its.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            assert hear(self.name, process, pipe) == "ready"
        self._signal(signal.SIGSTOP)

    def turn(self) -> float:
        """Lets it work for a turn; returns the seconds."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send("go")
        seconds: list[float] = [hear(self.name, *each) for each in zip(self._processes, self._pipes, strict=True)]
        self._signal(signal.SIGSTOP)
        return max(seconds)

    def end(self) -> None:
        """Ends its processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)


@contextmanager
def open_sides(entrants: list[Entrant], work: Work) -> Iterator[list[Side]]:
    """The sides, ready for their first turn; all of them are ended in the end."""
    sides: list[Side] = []
    try:
        for entrant in entrants:
            sides.append(Side(entrant, work))
        yield sides
    finally:
        for side in sides:
            side.end()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
