#!/usr/bin/env python3
"""Fine-tunes a model on questions whose answers are stretches of a text, as in SQuAD, and scores it.

    python finetuning/run_squad.py --version 1.1 --model runs/mini
    python finetuning/run_squad.py --version 2.0 --model google-bert/bert-base-uncased

The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import shlex
from dataclasses import dataclass
from typing import Literal

from pretraining.processes.environment import outlive_mpirun, prepare_process

prepare_process(small_steps=True)
if __name__ == "__main__":
    outlive_mpirun()  # before PyTorch starts threads

from data_prep.common.errors import UserError
from finetuning.files.splits import find_splits
from finetuning.inputs import Cutter
from finetuning.session.command import Command, find_data
from finetuning.session.session import main
from finetuning.settings import FineTuning
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Task
from pretraining.huggingface.weights import TaskHead
from pretraining.processes.ending import exit_now

HELD_OUT = 0.1
"""Share of the questions that is kept from training and scored where there is no dev file."""


@dataclass(frozen=True)
class RunSquad(Command):
    """Fine-tunes a model on SQuAD; every value of the recipe can be given as --section.key VALUE."""

    version: Literal["1.1", "2.0"] = "1.1"
    """1.1: every question has an answer; 2.0: some have none."""
    data: Path | None = None
    """Folder with train-v1.1.json and dev-v1.1.json, or those of 2.0, or the Parquet files of the Hugging Face hub
    (default: data/squad, then squad in the folder that CLOZE_DATA names)."""
    train: Path | None = None
    """The file to train on, instead of that of the folder."""
    dev: Path | None = None
    """The file to score, instead of that of the folder."""
    hold_out: float = 0.0
    """Share of the questions to keep from training, by whole articles, and to score instead of a dev file (default: 0.1
    where there is none)."""
    strict: bool = False
    """Refuse a file with an answer that is not at its offset, instead of leaving that out."""

    @property
    def suite(self) -> str:  # type: ignore[override]
        return f"squad-{self.version}"

    @property
    def recipes(self) -> tuple[str, str]:  # type: ignore[override]
        name = "squad1" if self.version == "1.1" else "squad2"
        return name, name

    def open_tasks(self, settings: FineTuning, cutter: Cutter, trained: TaskHead | None = None) -> list[Task]:
        """Reads the files."""
        train = self.train or self._find("train", needed=trained is None)
        if self.hold_out and self.dev:
            raise UserError("--hold-out and --dev: both say what is scored; choose one")
        dev = self.dev or (None if self.hold_out else self._find("dev", needed=False))
        train = train or dev  # of a model that is scored alone
        held_out = self.hold_out or (HELD_OUT if dev is None else 0.0)
        return [open_squad(self.version, train, dev, cutter, settings, strict=self.strict, held_out=held_out)]

    def _find(self, split: str, needed: bool) -> Path | None:
        """The file of a split in the folder of data, without which only a file that is named is enough."""
        name = f"{split}-v{self.version}"
        names = {split: (f"{name}.json", f"{name}.parquet", f"*{name}*.json")}
        try:
            folder = find_data(self.data, "squad")
        except UserError:
            if needed or self.data:
                raise
            return None
        fetch = f"squad --version {self.version} --out {shlex.quote(str(folder))}"
        found = find_splits(folder, names, [split] * needed, fetch).get(split, [])
        if len(found) > 1:
            there = ", ".join(path.name for path in found)
            raise UserError(f"{folder}: which is the {split} split? name one of them with --{split}: {there}")
        return found[0] if found else None


if __name__ == "__main__":
    exit_now(main(RunSquad, sys.argv[1:], "run_squad.py"))
