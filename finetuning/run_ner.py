#!/usr/bin/env python3
"""Fine-tunes a model to find names in sentences, as in CoNLL-2003, and scores it by whole names.

    python finetuning/run_ner.py --data conll2003/ --model google-bert/bert-base-cased --document-context
    python finetuning/run_ner.py --data conll2003/ --features concat-last-four

The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from dataclasses import dataclass

from pretraining.processes.environment import outlive_mpirun, prepare_process

prepare_process(small_steps=True)
if __name__ == "__main__":
    outlive_mpirun()  # before PyTorch starts threads

from finetuning.inputs import Cutter
from finetuning.session.command import Command, find_data
from finetuning.session.session import main
from finetuning.settings import FineTuning, LayerChoice
from finetuning.tasks.ner import open_ner
from finetuning.tasks.task import Task
from pretraining.huggingface.weights import TaskHead
from pretraining.processes.ending import exit_now

CURE = "put the train.txt, valid.txt and test.txt of CoNLL-2003, which may not be given on, into data/ner"
"""What a user can do who has no data."""


@dataclass(frozen=True)
class RunNer(Command):
    """Fine-tunes a model for names; every value of the recipe can be given as --section.key VALUE."""

    data: Path | None = None
    """Folder with train.txt, valid.txt and test.txt of CoNLL-2003, or eng.train, eng.testa and eng.testb (default:
    data/ner, then ner in the folder that CLOZE_DATA names)."""
    document_context: bool = False
    """Fill the sequence with neighbouring sentences of the same document."""
    features: LayerChoice = ""
    """Train a BiLSTM on the frozen activations of these layers, instead of the whole model."""

    @property
    def suite(self) -> str:  # type: ignore[override]
        return "ner" + f"-{self.features}" * bool(self.features)

    @property
    def recipes(self) -> tuple[str, str]:  # type: ignore[override]
        name = "ner_features" if self.features else "ner"
        return name, name

    def overrides(self) -> list[str]:
        """The settings that the command's own flags stand for."""
        own = ["--tags.document_context=true"] * self.document_context
        return [*super().overrides(), *own, *[f"--features.layers={self.features}"] * bool(self.features)]

    def open_tasks(self, settings: FineTuning, cutter: Cutter, trained: TaskHead | None = None) -> list[Task]:
        """Reads the files."""
        return [open_ner(find_data(self.data, "ner", CURE), cutter, settings, trained)]


if __name__ == "__main__":
    exit_now(main(RunNer, sys.argv[1:], "run_ner.py"))
