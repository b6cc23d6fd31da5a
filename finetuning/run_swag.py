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
    from data_prep.common.flags import print_help_if_asked
    from finetuning.flags import SwagFlags
    from pretraining.processes.environment import begin_rank

    print_help_if_asked(SwagFlags, sys.argv[1:], "run_swag.py", "finetuning")  # without PyTorch
    begin_rank(small_steps=True)

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
