"""A command of fine-tuning: connects the ranks, reads the model and the tasks, and does all runs.

Without a launcher, runs go side by side: one in this process, the others in workers, which are the same command again.
Each takes the next run that is free, until all are done.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal, NoReturn, cast

import torch
from rich.console import RenderableType

from data_prep.common.errors import UserError
from data_prep.common.files import write_json
from data_prep.common.flags import read_flags_and_rest
from data_prep.common.launchers import find_world
from data_prep.common.locks import LOCK, locked
from data_prep.common.outputs import refuse_inputs
from data_prep.common.progress import duration
from data_prep.common.reading import peek_device
from data_prep.common.supervision import exit_now
from data_prep.common.terminal import open_console
from finetuning.flags import TuningFlags
from finetuning.inputs import Cutter
from finetuning.results import PLAN, RESULTS
from finetuning.running import search
from finetuning.running.base import RUNS, Base, Run, find_model, find_order, list_casing_doubts, summarize_model
from finetuning.running.folders import refuse_without_class
from finetuning.running.outputs import list_layout_overrides, write_baseline
from finetuning.session import report, workers
from finetuning.session.item_checks import check_items
from finetuning.settings import FORM, load_settings
from finetuning.tasks.task import Setup
from pretraining.engine.precision import set_arithmetic
from pretraining.processes.context import Context
from pretraining.processes.ending import Ending
from pretraining.processes.group import agree, choose_device, connect, disconnect, gather, shared_errors
from pretraining.processes.stopping import Control, parse_time_limit
from pretraining.processes.watchdog import Watch
from pretraining.reporting.metrics_file import METRICS

SMALL = 768
"""Encoders narrower than this are miniatures, with larger learning rates."""


def main(kind: type[TuningFlags], arguments: list[str], program: str) -> int:
    """Parses and runs a command; returns the exit code, one of `Code` in processes/ending.py."""
    flags, overrides = read_flags_and_rest(kind, arguments, program, "finetuning")
    with Ending() as ending:
        Session(flags, [*flags.overrides(), *overrides], ending).run()
    return ending.code


def run(kind: type[TuningFlags]) -> NoReturn:
    """Runs the command of this process, and exits."""
    exit_now(main(kind, sys.argv[1:], Path(sys.argv[0]).name))


class Session:
    """The part of one process in a command."""

    def __init__(self, flags: TuningFlags, overrides: Sequence[str], ending: Ending) -> None:
        self.flags, self.overrides, self.ending = flags, overrides, ending
        self.console = open_console(soft_wrap=True, markup=False)
        self.environment = dict(os.environ)
        self.world = ending.world = find_world(self.environment)
        self.leads = self.world.rank == 0 and not workers.is_worker()
        """Whether this process prints and writes for all."""

    def run(self) -> None:
        """Does all runs of all tasks, or with --check prints them."""
        named = Path(self.flags.recipe) if self.flags.recipe else None
        device = choose_device(peek_device(FORM, named, self.overrides), self.world)
        connect(self.world, device, folder=self.flags.out or Path(RUNS))
        with shared_errors():
            self._read(cast(Literal["cpu", "cuda"], device.type))
        names = gather({task: [run.name for run in runs] for task, runs in self.runs.items()})[0]
        for task, runs in self.runs.items():  # where rank 0 sees earlier runs that have not reached other machines
            self.runs[task] = [
                replace(run, folder=self.out / task / name) for run, name in zip(runs, names[task], strict=True)
            ]
        self._share_machine(device)
        if self.flags.check:
            for part in report.build_plan(self.runs, self.settings, self.sharing, self.memory):
                self._print(part)
        else:
            self._work(device)
        disconnect()

    def _read(self, device: Literal["cpu", "cuda"]) -> None:
        """Reads the model, the settings and the tasks; raises UserError on any fault."""
        refuse_without_class(self.flags.model)
        self.model = find_model(self.flags.model, self.flags.sees)
        backward = find_model(self.flags.backward) if self.flags.backward else None
        self.base = Base(self.model, self.flags.from_scratch, backward)
        recipe = self._read_settings(device)
        self._read_tasks()
        self._print(f"model {self.model.name}; recipe {recipe}\nresults go to {self.out}")
        of_tasks = [f"{task.name}: {note}" for task in self.tasks for note in task.notes]
        vectors = any(task.head.kind == "embeddings" for task in self.tasks)
        for note in (*list_casing_doubts(self.model), *self.base.list_doubts(self.settings, vectors), *of_tasks):
            self._print(note)
        for task in self.tasks if self.leads else ():
            for line in check_items(task, trains=not self.flags.evaluate):
                self._print(f"{task.name}: {line}")

    def _read_settings(self, device: Literal["cpu", "cuda"]) -> str:
        """Reads the recipe with the overrides, chooses the folder of results, and returns the recipe's name."""
        flags, model, suite = self.flags, self.model, self.flags.suite()
        recipe = flags.recipe or (model.shape.hidden < SMALL and suite.small_recipe) or suite.recipe
        if flags.evaluate:
            given = {word.removeprefix("--").partition("=")[0] for word in self.overrides if word.startswith("--")}
            for name in ("from_scratch", "seeds", "learning_rate", "search.learning_rates", "batch", "epochs"):
                if getattr(flags, name, name in given):
                    raise UserError(f"--evaluate trains nothing: leave out --{name.replace('_', '-')}")
        if flags.evaluate or recipe == "embeddings":
            vectors = suite.recipe == "embeddings"
            self.overrides = [*list_layout_overrides(self.base, vectors, self.overrides), *self.overrides]
        self.settings = load_settings(recipe, self.overrides, device=device)
        self.base.require_fit(self.settings)
        if flags.evaluate and self.settings.features.layers:
            raise UserError("--evaluate: a BiLSTM on features is scored in its own training; predict.py asks it more")
        title = "+".join(summarize_model(each).name for each in self.base.models) + "-from-scratch" * flags.from_scratch
        self.out = flags.out or Path(RUNS) / title / suite.name
        read = (getattr(flags, flag, None) for flag in ("data", "model", "backward"))
        refuse_inputs([Path(os.path.abspath(self.out))], [Path(each) for each in read if each is not None])
        return recipe

    def _read_tasks(self) -> None:
        """Reads the files of all tasks, and lists their runs; refuses repeated tasks, a trained model of other labels,
        and runs of other settings in the tasks' folders."""
        trained = self.model.head if self.flags.evaluate else None
        gc.disable()  # looking through millions of objects that all stay takes longer than to make them
        try:
            self.tasks = self.flags.open_tasks(Setup(Cutter(self.model.vocabulary), self.settings, trained))
        finally:
            gc.enable()
        names = [task.name for task in self.tasks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{', '.join(twice)}: several tasks of this name; give each its own, or name it once")
        self.runs = {}
        for task in self.tasks:
            asks_model = task.answer_without_model() is None
            if task.head.kind == "embeddings":
                self.base.require_vectors(self.settings)
            elif asks_model and self.flags.evaluate:
                find_order(task.head, self.model)
            trains = asks_model and not self.flags.evaluate
            runs = search.list_runs(task, self.settings, self.out / task.name, self.base.identity, trains)
            self.runs[task.name] = runs

    def _work(self, device: torch.device) -> None:
        """Does all runs, and writes their results."""
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(Control(self.world, parse_time_limit(self.flags.time_limit)))
            with shared_errors():
                agree(self.settings.model_dump(mode="json"), "the settings")
                watch = Watch(self.world, run=self.out, device=device)
                if self.leads and not self.flags.share:
                    stack.enter_context(locked(self.out / LOCK, f"--out {self.out}", workers.BUSY))
                    self.ending.record_in(self.out)
                    write_json(self.out / PLAN, {task: [run.name for run in runs] for task, runs in self.runs.items()})
            for runs in self.runs.values() if not self.settings.no_baseline else ():
                if control.decide(wrong=False, saving=0.0):  # the first run hears it too, and saves
                    break
                with shared_errors():
                    for line in write_baseline(runs[0]) if self.leads else ():  # before the models, whose cards have it
                        self._print(line)
            jobs = self.sharing.jobs
            set_arithmetic(self.settings.precision, self.settings.compute, device)
            if jobs > 1:
                self._print(f"{jobs} runs at a time; every step of each is in its folder, in {METRICS}")
            with workers.start_workers(jobs, device, self.environment) as others, watch:
                context = Context(self.world, device, self.console, control, watch)
                self._run_all(context)
                with watch.pause():
                    while any(process.poll() is None for process in others):
                        workers.pause(control)
                if not workers.is_worker():  # what a worker was at that was killed
                    self._run_all(context, waits=control)
                with watch.pause(), shared_errors():
                    if self.leads and not self.flags.share:
                        self._write_results()

    def _share_machine(self, device: torch.device) -> None:
        """Decides the number of runs at a time. All ranks call it together."""
        runs = [*chain(*self.runs.values())]
        left = sum(not run.is_done for run in runs)
        largest = max((run.settings for run in runs), key=lambda settings: settings.batch)
        self.memory = max(workers.estimate_memory(task, largest, self.model.shape, device) for task in self.tasks)
        self.sharing = workers.share_machine(self.settings, self.world, device, len(runs), left, self.memory)

    def _run_all(self, context: Context, waits: Control | None = None) -> None:
        """Does the runs that are left, but for those that another process has taken; or `waits` for these."""
        for run in chain(*self.runs.values()):
            name = f"{run.task.name} {run.name}"
            if gather(run.is_done)[0]:  # as rank 0 sees it: files may reach other machines later, or not at all
                continue
            with contextlib.ExitStack() as stack:
                with shared_errors():
                    mine = self.world.rank > 0 or workers.take_run(run.folder, stack, waits)
                if not gather(mine)[0] or gather(run.is_done)[0]:
                    continue
                if self.sharing.jobs == 1:
                    self._print(name)
                else:
                    context = replace(context, run=name)
                torch.set_num_threads(self.sharing.threads)  # the run before may have had others
                begun = time.monotonic()
                result = search.train(run, self.base, context) if run.trains else search.score(run, self.model, context)
            if self.world.rank == 0:  # who alone knows the scores of a run that trains nothing; also in workers
                left = self._describe_left(run, max(time.monotonic() - begun, result.seconds or 0.0))
                self.console.print(f"{name}  {report.describe_outcome(result)}{left}")
            if self.leads:
                search.remove_worse_models(run.folder.parent)
            gc.collect()

    def _describe_left(self, run: Run, seconds: float) -> str:
        """Formats the time left for the unfinished runs of the task, given the seconds of this one."""
        left = [other.settings.epochs for other in self.runs[run.task.name] if other.trains and not other.is_done]
        seconds_left = seconds / run.settings.epochs * sum(left) / self.sharing.jobs
        return f"\n  {duration(seconds_left)} left for {run.task.name}" if left else ""

    def _write_results(self) -> None:
        """Writes, draws and prints the results of all tasks."""
        results = [report.write_task_results(self.runs[task.name][0]) for task in self.tasks]
        every = report.read_all_results(results, self.out, self.base.identity)
        report.write_results(every, self.out)
        warnings = chain(*(report.draw_task(self.out / result.task, result) for result in results))
        for part in (*warnings, *report.build_summary(results, self.out, every)):
            self._print(part)
        self.flags.finish(self.out, self.tasks, self.console)
        if lost := [result.task for result in results if result.best is None]:
            raise UserError(f"{', '.join(lost)}: no run has a score; the reasons stand in {self.out / RESULTS}")

    def _print(self, what: RenderableType) -> None:
        """Prints a line or a table, once for all processes."""
        if self.leads:
            self.console.print(what)
