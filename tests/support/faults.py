"""Faults of a rank, and all else that reaches into the product's own functions: adapt it here when they change.

A fault is a function that a rank calls before it trains: `launch(command, fault=partial(slow_save, 0.05))`.
"""

import errno
import gc
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import torch
import torch.distributed as dist
from support.commands import wait_for
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.checkpoint import writing
from pretraining.engine import gradients
from pretraining.engine.engine import Engine
from pretraining.model.encoder import PretrainingModel
from pretraining.processes import group, meeting, stopping
from pretraining.processes.watchdog import Watch
from pretraining.training import micro_batch
from pretraining.training.phases import TrainingPhase
from pretraining.training.trainer import Trainer

BAD = 2
"""number of the batch that `Poison` makes bad: step 3 takes it"""
COLLAPSED = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
"""what DeepSpeed says"""


def replace(owner: object, name: str, function: Callable[..., Any] | partialmethod[Any]) -> None:
    """Puts a function in the place of one of the product's, for good: the rank ends with its fault."""
    setattr(owner, name, function)


def wrap(owner: object, name: str, call: Callable[..., Any]) -> None:
    """Lets `call` run in the place of one of the product's functions, which it gets before the arguments."""
    original = getattr(owner, name)
    replace(owner, name, lambda *given, **more: call(original, *given, **more))


def start_as_a_process() -> None:
    """Lets the time limit count from the start of this rank: what loaded the modules has long been there. Modules stay
    out of garbage collections, also after the loop: going through them takes longer than most runs of a test."""
    stopping.STARTED = time.monotonic()
    gc.unfreeze = lambda: None


def around_steps(before: Callable[[Trainer], object], after: Callable[[Trainer], object] = lambda _: None) -> None:
    """A fault: calls a function of the trainer before each step of the run, and another after it."""

    def step(train_step: Callable[..., None], run: Trainer, *arguments: Any) -> None:
        before(run)
        train_step(run, *arguments)
        after(run)

    wrap(Trainer, "train_step", step)


def is_last(trainer: Trainer) -> bool:
    """Whether this is the last rank."""
    return trainer.context.world.rank == trainer.context.world.size - 1


def hold(gate: Path) -> None:
    """Creates the file `GATE.held`, then waits until a test creates the file `gate`."""
    gate.with_suffix(".held").touch()
    wait_for(gate.exists)


def send(number: int, now: bool) -> None:
    """Sends this process a signal."""
    if now:
        os.kill(os.getpid(), number)


def stop_at(step: int) -> None:
    """A fault: after this step of the run, the last rank hears a signal that asks to save and stop."""
    around_steps(lambda _: None, lambda run: send(signal.SIGUSR1, run.state.step == step and is_last(run)))


def signal_within_step(step: int) -> None:
    """A fault: in this step of the run, the last rank hears a signal after its first micro-batch."""
    stopping.QUESTION_SECONDS = 0.0  # ranks ask one another each time, as where a micro-batch takes long
    under_way = [False]

    def forward_and_signal(forward: Callable[..., Any], *given: Any) -> Any:
        output = forward(*given)
        now, under_way[0] = under_way[0], False
        send(signal.SIGTERM, now)
        return output

    around_steps(lambda run: under_way.__setitem__(0, run.state.step + 1 == step and is_last(run)))
    wrap(Engine, "forward", forward_and_signal)


def signal_within_evaluation(step: int) -> None:
    """A fault: in the evaluation after this step, the last rank hears a signal before its first batch."""
    stopping.QUESTION_SECONDS = 0.0  # as above

    def hear(evaluate: Callable[..., None], run: Trainer, *given: Any, **more: Any) -> None:
        send(signal.SIGTERM, run.state.step == step and is_last(run))
        evaluate(run, *given, **more)

    wrap(Trainer, "evaluate", hear)


def kill_at(step: int) -> None:
    """A fault: before this step of the run, all ranks are killed."""
    around_steps(lambda run: send(signal.SIGKILL, run.state.step + 1 == step))


def kill_one_after(step: int, rank: int, seconds: float) -> None:
    """A fault: kills a rank so many seconds after this step of the run."""
    soon = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def begin(run: Trainer) -> None:
        if run.context.world.rank == rank and run.state.step >= step and soon.ident is None:
            soon.start()

    around_steps(begin)


def fill_the_disk_of_rank_1() -> None:
    """A fault: rank 1 finds the disk full while rank 0 is about to write, and both know how it went after the step."""

    def write(write_all: Callable[..., None], *given: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.2)
        write_all(*given)

    def report_late(report: Callable[..., None], *given: Any) -> None:
        time.sleep(0.5)
        report(*given)

    wrap(writing.Saver, "_write", write)
    wrap(writing.Saver, "report", report_late)


def slow_save(seconds: float) -> None:
    """A fault: every file of a checkpoint takes longer."""
    wait_before_files(lambda: time.sleep(seconds))


def hold_saves_from(step: int, gate: Path) -> None:
    """A fault: holds saves once so many steps of the run are done."""
    reached: list[int] = []
    around_steps(lambda run: reached.append(step) if run.state.step >= step else None)
    wait_before_files(lambda: hold(gate) if reached else None)


def wait_before_files(wait: Callable[[], object]) -> None:
    """A fault: calls `wait` for each file of a checkpoint, before the file is read back."""

    def compare_late(compare: Callable[..., None], *given: Any) -> None:
        wait()
        compare(*given)

    wrap(writing, "_compare", compare_late)


def miss_ranks_after(seconds: float) -> None:
    """A fault: a rank is taken for gone after so many seconds without a beat, instead of 60."""
    replace(Watch, "__init__", partialmethod(Watch.__init__, silence=seconds))


def fail_alone(step: int) -> None:
    """A fault: in this step, the last rank has an error that no other one has."""

    def fail(run: Trainer) -> None:
        if run.state.step + 1 == step and is_last(run):
            raise UserError("no room")

    around_steps(fail)


def stay_in_the_group(step: int | None = None) -> None:
    """A fault: no rank can leave its process group, as where NCCL waits for a kernel that never ends; and in `step`,
    the last rank fails alone."""
    replace(dist, "destroy_process_group", lambda *_, **__: threading.Event().wait())
    setattr(group, "LEAVE_SECONDS", 0.5)  # noqa: B010
    if step is not None:
        fail_alone(step)


def hold_start(gate: Path) -> None:
    """A fault: holds rank 0 while it makes its model, for which the others wait."""

    def initialize_late(initialize: Callable[..., Any], *given: Any) -> Any:
        if os.environ["RANK"] == "0":
            hold(gate)
        return initialize(*given)

    wrap(PretrainingModel, "initialize", initialize_late)


def mark_meeting(mark: Path) -> None:
    """A fault: creates a file when a rank begins to wait for the others to come."""

    def mark_and_wait(wait: Callable[..., None], *given: Any) -> None:
        mark.touch()
        wait(*given)

    wrap(meeting, "_wait_for_all", mark_and_wait)


def hold_before(step: int, gate: Path) -> None:
    """A fault: holds all ranks before this step of the run; signals within a minute count as one key press."""
    stopping.ECHO_SECONDS = 60.0
    around_steps(lambda run: hold(gate) if run.state.step + 1 == step else None)


def jumping_clock() -> None:
    """A fault: the time of day jumps by hours whenever somebody asks for it, to and fro."""
    now, count = time.time, itertools.count()
    time.time = lambda: now() + 3600 * (-5, 0, 7)[next(count) % 3]


def slow_steps(last: int, seconds: float) -> None:
    """A fault: the steps of the run up to the last of these each take longer."""
    around_steps(lambda _: None, lambda run: time.sleep(seconds * (run.state.step <= last)))


def all_of(*faults: Callable[[], None]) -> None:
    """Several faults."""
    for fault in faults:
        fault()


@dataclass
class Capacity:
    """A fault: each rank's memory holds so many sequences, and more are too many; asked for, it is told at once."""

    sequences: tuple[int, ...]

    def __call__(self) -> None:
        limit = self.sequences[int(os.environ["RANK"])]

        def check(wanted: int) -> None:
            if wanted > limit:
                raise torch.OutOfMemoryError(f"{wanted} sequences, and there is memory for {limit}")

        def try_on_copy(compute: Callable[..., None], *given: Any) -> None:
            check(given[3])
            compute(*given)

        def step(forward: Callable[..., Any], engine: Engine, batch: Any) -> Any:
            check(len(batch.lengths))
            return forward(engine, batch)

        replace(micro_batch, "can_try", lambda _: True)
        wrap(micro_batch, "compute_on_copy", try_on_copy)
        wrap(Engine, "forward", step)


@dataclass
class Poison:
    """A fault of a batch or a step of the first phase: on rank 1 alone; a loss scale that collapses, on all ranks."""

    what: Literal["loss", "gradient", "leap", "collapse"]
    """the loss of the second micro-batch or the gradient is no number, all losses are too large, the loss scale ends"""
    follows: Literal["batch", "step"]
    """whether the batch is bad whenever it comes, or the step whatever its batch"""
    number: int = BAD
    """of the batch or the step"""
    die_at: int = 0
    """the step of the run at which all ranks are killed; 0: none"""
    now: bool = False
    """whether the step that is under way is bad"""
    micro: int = 0
    """how many micro-batches of the step have been computed"""
    unseen: bool = False
    """whether the norm of the gradient stays where it is, as on a GPU, and the host learns of it later"""

    def __call__(self) -> None:
        if self.unseen:
            replace(gradients, "stays_on_device", lambda _: True)
            Trainer.looks_at_once = property(lambda _: False)  # type: ignore[method-assign, assignment]
        wrap(Trainer, "train_step", self.find)
        wrap(Engine, "forward", self.poison_losses)
        wrap(Engine, "backward", self.poison_gradients)
        wrap(Engine, "step", self.poison_scale)

    def find(self, train_step: Callable[..., None], run: Trainer, phase: TrainingPhase, *given: Any) -> None:
        """Finds the bad ones."""
        state, here = run.state, run.context.world.rank == 1 or self.what == "collapse"
        number = phase.batch_number(state.phase_step) if self.follows == "batch" else state.phase_step
        self.now, self.micro = here and phase.number == 0 and number == self.number, 0
        train_step(run, phase, *given)
        send(signal.SIGKILL, state.step == self.die_at)

    def poison_losses(self, forward: Callable[..., Any], *given: Any) -> Any:
        losses = forward(*given)
        self.micro += 1
        factor = math.nan if self.what == "loss" and self.micro == 2 else 5.0 if self.what == "leap" else 1.0
        return losses._replace(masked=losses.masked * factor) if self.now and factor != 1 else losses

    def poison_gradients(self, backward: Callable[..., None], engine: Engine, loss: Tensor, **more: Any) -> None:
        if self.now and self.what == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
        backward(engine, loss, **more)

    def poison_scale(self, step: Callable[..., None], engine: Engine, learning_rate: float) -> None:
        if self.now and self.what == "collapse":
            engine.deepspeed.step = Mock(side_effect=Exception(COLLAPSED))
        step(engine, learning_rate)
