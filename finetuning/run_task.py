#!/usr/bin/env python3
"""Fine-tunes a model on a task of your own, which a TOML file of ten lines describes, and scores it.

    python finetuning/run_task.py reviews.toml --model runs/mini

What the file says: docs/own-tasks.md. The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()
    from finetuning.flags import TaskFlags, begin_rank

    begin_rank(TaskFlags)

from functools import partial

from data_prep.common.errors import UserError, check_all
from finetuning.flags import Suite, TaskFlags
from finetuning.session.session import run
from finetuning.tasks.own import open_own, read_own
from finetuning.tasks.task import Setup, Task


class RunTask(TaskFlags):
    """Reads tasks of one's own."""

    def suite(self) -> Suite:
        """Names the recipes: vectors are trained with other values than the rest."""
        of_vectors = {own.kind == "embeddings" for own in check_all(*(partial(read_own, task) for task in self.tasks))}
        if len(of_vectors) == 2:
            raise UserError('tasks of kind = "embeddings" have a recipe of their own; give them in another command')
        return Suite("own", "embeddings") if True in of_vectors else super().suite()

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files of the tasks."""
        if not self.tasks:
            raise UserError("no task: name a TOML file that describes one; docs/own-tasks.md says what is in it")
        return check_all(*(partial(open_own, task, setup) for task in self.tasks))


if __name__ == "__main__":
    run(RunTask)
