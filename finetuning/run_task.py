#!/usr/bin/env python3
"""Fine-tunes a model on a task of your own, which a TOML file of ten lines describes, and scores it.

    python finetuning/run_task.py reviews.toml --model runs/mini

What the file says: docs/own-tasks.md. The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pretraining.processes.environment import outlive_mpirun, prepare_process

prepare_process(small_steps=True)
if __name__ == "__main__":
    outlive_mpirun()  # before PyTorch starts threads

import tyro

from data_prep.common.errors import UserError
from finetuning.inputs import Cutter
from finetuning.session.command import Command
from finetuning.session.session import main
from finetuning.settings import FineTuning
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Task
from pretraining.huggingface.weights import TaskHead
from pretraining.processes.ending import exit_now


@dataclass(frozen=True)
class RunTask(Command):
    """Fine-tunes a model on tasks of your own; every value of the recipe can be given as --section.key VALUE."""

    suite: ClassVar[str] = "own"
    recipes: ClassVar[tuple[str, str]] = ("own", "miniature")

    tasks: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """TOML files that describe tasks, at least one."""

    def open_tasks(self, settings: FineTuning, cutter: Cutter, trained: TaskHead | None = None) -> list[Task]:
        """Reads the files of the tasks."""
        if not self.tasks:
            raise UserError("no task: name a TOML file that describes one; docs/own-tasks.md says what is in it")
        return [open_own(task, cutter, settings, trained) for task in self.tasks]


if __name__ == "__main__":
    exit_now(main(RunTask, sys.argv[1:], "run_task.py"))
