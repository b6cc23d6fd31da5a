#!/usr/bin/env python3
"""Fine-tunes a model to find names in sentences, as in CoNLL-2003, and scores it by whole names.

    python finetuning/run_ner.py --data conll2003/ --model google-bert/bert-base-cased
    python finetuning/run_ner.py --data conll2003/ --recipe ner_features --out runs/features

The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()
    from finetuning.flags import NerFlags, begin_rank

    begin_rank(NerFlags)

from finetuning.flags import NerFlags, find_data
from finetuning.session.session import run
from finetuning.tasks.ner import open_ner
from finetuning.tasks.task import Setup, Task

CURE = "put the train.txt, valid.txt and test.txt of CoNLL-2003, which may not be given on, into data/ner"
"""The cure for missing data."""


class RunNer(NerFlags):
    """Reads the files of CoNLL-2003."""

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files."""
        return [open_ner(find_data(self.data, "ner", CURE), setup)]


if __name__ == "__main__":
    run(RunNer)
