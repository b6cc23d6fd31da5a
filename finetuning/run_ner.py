#!/usr/bin/env python3
"""Fine-tunes a model to find names in sentences, as in CoNLL-2003, and scores it by whole names.

    python finetuning/run_ner.py --data conll2003/ --model google-bert/bert-base-cased
    python finetuning/run_ner.py --data conll2003/ --features concat-last-four

The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()
    from pretraining.processes.environment import begin_rank

    begin_rank(small_steps=True)

from dataclasses import dataclass

from finetuning.session.flags import Suite, TuningFlags, find_data
from finetuning.session.session import run
from finetuning.settings import LayerChoice
from finetuning.tasks.ner import open_ner
from finetuning.tasks.task import Setup, Task

CURE = "put the train.txt, valid.txt and test.txt of CoNLL-2003, which may not be given on, into data/ner"
"""The cure for missing data."""


@dataclass(frozen=True)
class RunNer(TuningFlags):
    """Fine-tunes a model for names; every value of the recipe can be given as --section.key VALUE."""

    data: Path | None = None
    """Folder with train.txt, valid.txt and test.txt of CoNLL-2003, or eng.train, eng.testa and eng.testb (default:
    data/ner, then ner in the folder that CLOZE_DATA names)."""
    features: LayerChoice = ""
    """Train a BiLSTM on the frozen activations of these layers, instead of the whole model."""

    def suite(self) -> Suite:
        return Suite(f"ner-{self.features}", "ner_features") if self.features else Suite("ner", "ner")

    def overrides(self) -> list[str]:
        """Returns the command's own flags as overrides of settings."""
        return [*super().overrides(), *[f"--features.layers={self.features}"] * bool(self.features)]

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files."""
        return [open_ner(find_data(self.data, "ner", CURE), setup)]


if __name__ == "__main__":
    run(RunNer)
