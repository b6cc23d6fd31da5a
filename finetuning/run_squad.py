#!/usr/bin/env python3
"""Fine-tunes a model on questions whose answers are spans of a text, as in SQuAD, and scores it.

    python finetuning/run_squad.py --version 1.1 --model runs/mini
    python finetuning/run_squad.py --version 2.0 --model google-bert/bert-base-uncased

The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()
    from finetuning.flags import SquadFlags, begin_rank

    begin_rank(SquadFlags)

from data_prep.common.errors import UserError, quote
from finetuning.files.splits import find_splits
from finetuning.flags import SquadFlags, find_data
from finetuning.session.session import run
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Setup, Task


class RunSquad(SquadFlags):
    """Reads the files of SQuAD."""

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files."""
        train = self.train or self._find("train", needed=setup.trained is None)
        dev = self.dev or self._find("dev", needed=False)
        return [open_squad(self.version, train or dev, dev, setup)]  # a model that is scored alone needs no train

    def _find(self, split: str, needed: bool) -> Path | None:
        """Finds the file of a split in the folder of data; None if it is not there and not needed."""
        name = f"{split}-v{self.version}"
        names = {split: (f"{name}.json", f"*{name}*.json")}
        try:
            folder = find_data(self.data, "squad")
        except UserError:
            if needed or self.data:
                raise
            return None
        fetch = f"squad --version {self.version} --out {quote(folder)}"
        found = find_splits(folder, names, [split] * needed, fetch).get(split, [])
        if len(found) > 1:
            there = ", ".join(path.name for path in found)
            raise UserError(f"{folder}: which is the {split} split? name one of them with --{split}: {there}")
        return found[0] if found else None


if __name__ == "__main__":
    run(RunSquad)
