#!/usr/bin/env python3
"""Fine-tunes a model on the tasks of GLUE, and scores it.

    python finetuning/run_glue.py
    python finetuning/run_glue.py --task sst2 mrpc --model runs/mini --seeds 5
    torchrun --nproc-per-node 2 finetuning/run_glue.py --task mnli --model google-bert/bert-base-uncased

Without --task, all tasks whose files are found. The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()
    from finetuning.flags import GlueFlags, begin_rank

    begin_rank(GlueFlags)

from collections.abc import Sequence

from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from finetuning.files.splits import find_glue
from finetuning.flags import GlueFlags, find_data
from finetuning.results import PREDICTIONS, RESULTS
from finetuning.session.session import run
from finetuning.tasks.glue import TASKS, open_glue, write_submission
from finetuning.tasks.task import Setup, Task

SUBMISSION = "submission.zip"


class RunGlue(GlueFlags):
    """Reads the tasks of GLUE, and writes their submission."""

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files of the given tasks, or of all that are found."""
        data = find_data(self.data, "glue")
        names = self.task or find_glue(data)
        if not names:
            raise UserError(f"{data}: no folder of a task of GLUE; python finetuning/fetch.py glue fetches them")
        return [open_glue(name, data, setup) for name in names]

    def finish(self, out: Path, tasks: Sequence[Task], console: Console) -> None:
        """Writes the answers to the test splits, with those of earlier commands for the same model, to the zip for the
        leaderboard."""
        zipped = out / SUBMISSION
        if not self.submission and not any(task.test for task in tasks):
            return
        # Each task that is only scored has a model of its own; of trained ones those of another model are not sent.
        of_model = TASKS if self.evaluate else read_json(out / RESULTS)
        folders = [out / name / PREDICTIONS for name in TASKS if name in of_model]
        try:
            write_submission(folders, zipped, fill=self.submission)
        except UserError as error:
            if self.submission:
                raise
            if not self.task:  # who names tasks does not expect all of them to be answered
                console.print(f"no {error}")
        else:
            console.print(f"{zipped}: what gluebenchmark.com takes")


if __name__ == "__main__":
    run(RunGlue)
