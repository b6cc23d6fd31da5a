#!/usr/bin/env python3
"""Makes a folder that transformers loads from a run.

    python pretraining/export.py runs/mini --out exported/mini

Also from a folder of transformers, which comes out with today's names and as safetensors. What is written is read back,
by us and by transformers where it is installed, and must compute the same logits before it takes its name.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

    from data_prep.common.flags import print_help_if_asked
    from pretraining.flags import Export

    print_help_if_asked(Export, sys.argv[1:], "export.py", "training")  # without PyTorch


from data_prep.common.flags import read_flags
from data_prep.common.terminal import open_console, run_curable
from pretraining.flags import Export
from pretraining.training.exporting import export


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 2 something that the user can cure."""
    wanted = read_flags(Export, arguments, "export.py", "training")
    return run_curable(lambda: open_console(soft_wrap=True).print(str(export(wanted)), markup=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
