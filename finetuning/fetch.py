#!/usr/bin/env python3
"""Fetches the data that models are compared on: the tasks of GLUE, SQuAD 1.1 and 2.0, SWAG, or makes a small task.

    python finetuning/fetch.py glue
    python finetuning/fetch.py glue --task sst2 mrpc --from-hub
    python finetuning/fetch.py squad --version 1.1
    python finetuning/fetch.py swag
    python finetuning/fetch.py demo

Whatever interrupts it, the same command continues it. The files lie where `run_glue.py`, `run_squad.py` and
`run_swag.py` look for them.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from data_prep.fetching.client import run_entry
from finetuning.fetching.demo_task import FetchDemo
from finetuning.fetching.downloads import FetchGlue, FetchSquad, FetchSwag


def main(arguments: list[str]) -> int:
    """Fetches what the command line asks for; returns the exit code."""
    return run_entry({"glue": FetchGlue, "squad": FetchSquad, "swag": FetchSwag, "demo": FetchDemo}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
