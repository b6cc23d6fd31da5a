#!/usr/bin/env python3
"""Fine-tunes a model to choose how a situation goes on, as in SWAG, and scores it.

    python finetuning/run_swag.py --model runs/mini

The same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()
    from finetuning.flags import SwagFlags, begin_rank

    begin_rank(SwagFlags)

from finetuning.flags import SwagFlags, find_data
from finetuning.session.session import run
from finetuning.tasks.swag import open_swag
from finetuning.tasks.task import Setup, Task


class RunSwag(SwagFlags):
    """Reads the files of SWAG."""

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files."""
        return [open_swag(find_data(self.data, "swag"), setup)]


if __name__ == "__main__":
    run(RunSwag)
