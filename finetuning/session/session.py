"""A whole command of fine-tuning: the ranks meet, read the model and the tasks, and go through all runs.

Without a launcher, runs go side by side: one in this process, the others in workers, which are the same command again.
Each takes a run that nobody has taken yet, until all are done.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import tyro
from rich.console import Console, RenderableType

from data_prep.common.capacity import collection_paused
from data_prep.common.errors import UserError
from data_prep.common.files import write_json
from data_prep.common.launchers import find_world
from data_prep.common.locks import locked
from data_prep.common.progress import duration
from data_prep.common.reading import peek_device
from data_prep.common.terminal import open_console
from finetuning.inputs import Cutter
from finetuning.model.features import LAST_FOUR
from finetuning.model.models import RUNS, find_model, find_order, fine_tuned_head, notes_on, summary_of
from finetuning.places import PLAN, RESULTS
from finetuning.running.base import Base, identity_of
from finetuning.running.search import (
    Member,
    list_members,
    remove_worse_models,
    require_same,
    results_in,
    run_member,
    score_member,
    what_decides,
)
from finetuning.running.without_training import as_it_was_trained, outputs_of_model, outputs_without_model
from finetuning.session.command import Command
from finetuning.session.drawing import draw
from finetuning.session.look import look
from finetuning.session.plan import plan
from finetuning.session.report import conclude, outcome, summary
from finetuning.session.sharing import memory_of_run, share_machine
from finetuning.session.workers import BUSY, LOCK, Workers, taken, worker_number
from finetuning.settings import FORM, FineTuning, load_settings
from finetuning.tasks.task import Task
from pretraining.checkpoint.models import Model
from pretraining.engine.precision import set_arithmetic
from pretraining.processes.context import Context
from pretraining.processes.ending import Ending
from pretraining.processes.group import (
    agree,
    choose_device,
    connect,
    disconnect,
    gather,
    shared_errors,
)
from pretraining.processes.stopping import Control, time_limit
from pretraining.processes.watchdog import Watch
from pretraining.reporting.metrics_file import METRICS

SMALL = 768
"""Encoders narrower than this are miniatures, which take larger learning rates."""


AnyCommand = TypeVar("AnyCommand", bound=Command)


def main(kind: type[AnyCommand], arguments: list[str], program: str) -> int:
    """Reads the command and does it; returns the exit code, as `Code` of processes/ending.py says."""
    command, overrides = tyro.cli(
        kind, args=arguments, prog=program, return_unknown_args=True, config=(tyro.conf.FlagCreatePairsOff,)
    )
    with Ending() as ending:
        Session(command, [*command.overrides(), *overrides], ending).run()
    return ending.code


class Session:
    """One process's part of a command."""

    def __init__(self, command: Command, overrides: Sequence[str], ending: Ending) -> None:
        self.command, self.overrides, self.ending = command, overrides, ending
        self.console = open_console(soft_wrap=True)
        self.environment = dict(os.environ)
        self.world = ending.world = find_world(self.environment)
        self.leads = self.world.rank == 0 and not worker_number()
        """whether this process speaks for all"""

    def run(self) -> None:
        """Goes through all runs of all tasks, or says what they will be."""
        named = Path(self.command.recipe) if self.command.recipe else None
        device = choose_device(peek_device(FORM, named, self.overrides), self.world)
        connect(self.world, device)
        with shared_errors():
            self._read(cast(Literal["cpu", "cuda"], device.type))
        self._share(device)
        if self.command.check:
            for part in plan(self.tasks, self.runs, self.settings, self.sharing, self.memory):
                self._print(part)
        else:
            self._work(device)
        disconnect()

    def _read(self, device: Literal["cpu", "cuda"]) -> None:
        """Reads the model, the settings and the tasks; all faults of them end the command."""
        self.model = find_model(self.command.model)
        recipe = self._read_settings(device)
        self._read_tasks()
        self._list_runs()
        self._print(f"model {self.model.name}; recipe {recipe}\nresults go to {self.out}")
        of_tasks = [f"{task.name}: {note}" for task in self.tasks for note in task.notes]
        for note in (*notes_on(self.model), *length_doubts(self.settings, self.model), *of_tasks):
            self._print(note)
        for task in self.tasks if self.leads else ():
            for line in look(task, trains=not self.command.evaluate):
                self._print(f"{task.name}: {line}")

    def _read_settings(self, device: Literal["cpu", "cuda"]) -> str:
        """Reads the recipe for the model, as it is called, with what the command says; and where results go."""
        command, model = self.command, self.model
        normal, small = command.recipes
        recipe = command.recipe or (small if model.shape.hidden < SMALL else normal)
        if command.evaluate:
            if command.from_scratch:
                raise UserError("--evaluate and --from-scratch: fresh weights have learned nothing; choose one")
            self.overrides = [*as_it_was_trained(model.folder, self.overrides), *self.overrides]
        self.settings = load_settings(recipe, self.overrides, device=device)
        require_room(self.settings, model)
        if command.evaluate and self.settings.features.layers:
            raise UserError("--evaluate: a BiLSTM on features is scored in its own training; predict.py asks it more")
        title = summary_of(model).name + "-from-scratch" * command.from_scratch
        self.out = command.out or Path(RUNS) / title / command.suite
        for flag in ("data", "model"):
            read = getattr(command, flag, None)
            if read is not None and os.path.exists(read) and self.out.exists() and self.out.samefile(read):
                raise UserError(f"--out {self.out}: is --{flag} {read}, which is read; name another --out")
        return recipe

    def _read_tasks(self) -> None:
        """Reads the files of all tasks, and refuses those that the command is not for."""
        with collection_paused():
            trained = self.model.head if self.command.evaluate else None
            self.tasks = self.command.open_tasks(self.settings, Cutter(self.model.vocabulary), trained)
        names = [task.name for task in self.tasks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{', '.join(twice)}: several tasks of this name; give each its own, or name it once")
        others = [task.name for task in self.tasks if task.head.kind != "tags"]
        if self.settings.features.layers and others:
            raise UserError(f"features.layers: is for tags of words alone, and not for {', '.join(others)}")
        for task in self.tasks if self.command.evaluate else ():
            if outputs_without_model(task) is None:
                find_order(task.head, fine_tuned_head(self.model), self.model.name)

    def _list_runs(self) -> None:
        """Lists the runs of all tasks, which go on in their folders only as they were begun."""
        self.runs = [(task, member) for task in self.tasks for member in self._members(task)]
        self.base = Base(self.model, self.command.from_scratch)
        self.data = {task.name: identity_of(task) for task in self.tasks}
        for task in self.tasks:
            wanted = {member.name: self._identity(task, member) for other, member in self.runs if other is task}
            require_same(self.out / task.name, wanted)

    def _work(self, device: torch.device) -> None:
        """Goes through all runs, and concludes from them."""
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(Control(self.world, time_limit(self.command.time_limit)))
            with shared_errors():
                agree(self.settings.model_dump(mode="json"), "the settings")
                watch = Watch(self.world, run=self.out)
                if self.leads and not self.command.share:
                    stack.enter_context(locked(self.out / LOCK, f"--out {self.out}", BUSY))
                    self.ending.record_in(self.out)
                    names = {task.name: [run.name for other, run in self.runs if other is task] for task in self.tasks}
                    write_json(self.out / PLAN, names)
            jobs = self.sharing.jobs
            set_arithmetic(self.settings.precision, self.settings.compute, device)
            if jobs > 1:
                self._print(f"{jobs} runs at a time; every step of each is in its folder, in {METRICS}")
            with Workers(jobs, device, self.environment) as workers, watch:
                context = Context(self.world, device, self.console, control, watch)
                self._run_all(context)
                with watch.pause():
                    workers.wait(control)
                if not worker_number():  # what a worker was at that was killed
                    self._run_all(context, waits=control)
                with watch.pause(), shared_errors():
                    if self.leads and not self.command.share:
                        self._conclude()

    def _share(self, device: torch.device) -> None:
        """Finds how many runs go at a time. All ranks call it together."""
        left = sum(results_in(self._folder(task, member)) is None for task, member in self.runs)
        largest = max((member.settings for _, member in self.runs), key=lambda settings: settings.batch)
        self.memory = max(memory_of_run(task, largest, self.model.shape, device) for task in self.tasks)
        self.sharing = share_machine(self.settings, self.world, device, len(self.runs), left, self.memory)

    def _run_all(self, context: Context, waits: Control | None = None) -> None:
        """Goes through the runs that are not done, but for those that another process has; or `waits` for these."""
        for task, member in self.runs:
            folder, name = self._folder(task, member), f"{task.name} {member.name}"
            if is_done(folder):
                continue
            with contextlib.ExitStack() as stack:
                with shared_errors():
                    mine = self.world.rank > 0 or stack.enter_context(taken(folder, waits))
                if not gather(mine)[0] or is_done(folder):
                    continue
                if self.sharing.jobs == 1:
                    self._print(name)
                else:
                    context = replace(context, run=name)
                torch.set_num_threads(self.sharing.threads)  # the run before may have had others
                begun = time.monotonic()
                results = self._make(task, member, folder, context)
            if self.world.rank == 0:  # who alone knows the scores of a run that trains nothing; also in workers
                left = self._left(task, member, max(time.monotonic() - begun, results.get("seconds", 0.0)))
                say(self.console, f"{name}  {outcome(results)}{left}")
            if self.leads:
                remove_worse_models(folder.parent)
            gc.collect()

    def _members(self, task: Task) -> list[Member]:
        """The runs of a task: one where it is scored without training."""
        if self.command.evaluate or outputs_without_model(task) is not None:
            return [Member("scored", self.settings, trains=False)]
        return list_members(self.settings)

    def _make(self, task: Task, member: Member, folder: Path, context: Context) -> dict[str, Any]:
        """Goes through a run; returns its results."""
        identity = self._identity(task, member)
        if member.trains:
            epochs = self._epochs_after(task, member)
            return run_member(task, member, self.base, folder, identity, context, epochs)
        outputs = outputs_without_model(task) or outputs_of_model(task, self.model, member.settings, context)
        return score_member(task, member, outputs, folder, identity, context)

    def _epochs_after(self, task: Task, member: Member) -> float:
        """The epochs of the runs of a task that are not done, without this one: of those at a time one counts."""
        others = [other for of, other in self.runs if of is task and other is not member and other.trains]
        left = [other.settings.epochs for other in others if results_in(self._folder(task, other)) is None]
        return sum(left) / self.sharing.jobs

    def _left(self, task: Task, member: Member, seconds: float) -> str:
        """A line on how long the other runs of a task will still take, where this one took so many seconds."""
        after = self._epochs_after(task, member)
        return f"\n  {duration(seconds / member.settings.epochs * after)} left for {task.name}" if after else ""

    def _folder(self, task: Task, member: Member) -> Path:
        return self.out / task.name / member.name

    def _identity(self, task: Task, member: Member) -> dict[str, Any]:
        """What the outcome of a run depends on, in JSON."""
        return {"settings": what_decides(member.settings), "model": self.base.identity, "data": self.data[task.name]}

    def _conclude(self) -> None:
        """Tells what came of all runs, and keeps the best of every task."""
        results = [conclude(task, self.out / task.name, self.data[task.name]) for task in self.tasks]
        write_json(self.out / RESULTS, {result["task"]: result for result in results})
        for task, result in zip(self.tasks, results, strict=True):
            for warning in draw(task, self.out / task.name, result):
                self._print(warning)
        for part in summary(results, self.out):
            self._print(part)
        self.command.finish(self.out, self.tasks, self.console)
        if lost := [result["task"] for result in results if result["best"] is None]:
            raise UserError(f"{', '.join(lost)}: no run has a score; the reasons stand in {self.out / RESULTS}")

    def _print(self, what: RenderableType) -> None:
        """Prints a line or a table, once for all processes."""
        if self.leads:
            say(self.console, what)


def say(console: Console, what: RenderableType) -> None:
    """Prints a line as it is, or a table."""
    console.print(what, markup=False, highlight=False)


def require_room(settings: FineTuning, model: Model) -> None:
    """Refuses settings that ask for more positions or layers than the model has."""
    name, shape, layers = model.name, model.shape, settings.features.layers
    if settings.length > shape.positions:
        raise UserError(
            f"length = {settings.length}: {name} has {shape.positions} positions; take --length {shape.positions}"
        )
    if layers.endswith("last-four") and shape.layers < LAST_FOUR:
        raise UserError(f"features.layers = {layers}: {name} has {shape.layers} layers; take last or weighted-all")


def length_doubts(settings: FineTuning, model: Model) -> list[str]:
    """A line for the user where sequences may be longer than the model has ever seen."""
    longest = model.trained
    if settings.length <= longest:
        return []
    return [
        f"{model.name}: was trained on texts of {longest} pieces at most; longer ones, up to --length "
        f"{settings.length}, have positions that it knows nothing of"
    ]


def is_done(folder: Path) -> bool:
    """Whether a run has results, as rank 0 sees it: files may reach other machines later, or not at all."""
    done: bool = gather(results_in(folder) is not None)[0]
    return done
