#!/usr/bin/env python3
"""Fine-tunes a model to choose how a situation goes on, as in SWAG, and scores it.

    python finetuning/run_swag.py --model runs/mini

The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass
from typing import ClassVar

from pretraining.processes.environment import outlive_mpirun, prepare_process

prepare_process(small_steps=True)
if __name__ == "__main__":
    outlive_mpirun()  # before PyTorch starts threads

from finetuning.inputs import Cutter
from finetuning.session.command import Command, find_data
from finetuning.session.session import main
from finetuning.settings import FineTuning
from finetuning.tasks.swag import open_swag
from finetuning.tasks.task import Task
from pretraining.huggingface.weights import TaskHead
from pretraining.processes.ending import exit_now


@dataclass(frozen=True)
class RunSwag(Command):
    """Fine-tunes a model on SWAG; every value of the recipe can be given as --section.key VALUE."""

    suite: ClassVar[str] = "swag"
    recipes: ClassVar[tuple[str, str]] = ("swag", "swag")

    data: Path | None = None
    """Folder with train.csv, val.csv and test.csv (default: data/swag, then swag in CLOZE_DATA)."""

    def open_tasks(self, settings: FineTuning, cutter: Cutter, trained: TaskHead | None = None) -> list[Task]:
        """Reads the files."""
        return [open_swag(find_data(self.data, "swag"), cutter, settings, trained)]


if __name__ == "__main__":
    exit_now(main(RunSwag, sys.argv[1:], "run_swag.py"))
