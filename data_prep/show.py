#!/usr/bin/env python3
"""Prints a training example as a reader would mark it.

    python data_prep/show.py data/wiki --length 128 --index 7

Also works on a folder that is not finished, from the moment that it has examples.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

import io

import tyro

from data_prep.common.capacity import limit_memory
from data_prep.common.errors import UserError
from data_prep.common.terminal import open_console
from data_prep.inspection.lookup import Wanted, find_example
from data_prep.inspection.marking import heading, marked

ABOUT = "Prints a training example: segments A and B, and what is masked, replaced or kept."


def main(arguments: list[str]) -> int:
    """Prints the example that the arguments name; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have all characters
    console, errors = open_console(soft_wrap=True), open_console(stderr=True, soft_wrap=True)
    wanted = tyro.cli(Wanted, args=arguments, prog="show.py", description=ABOUT, config=(tyro.conf.FlagCreatePairsOff,))
    try:
        example, vocabulary = find_example(wanted)
    except (UserError, PermissionError) as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    console.print(heading(wanted.index, example), markup=False)
    for line in marked(example, vocabulary):
        console.print(line)
    return 0


if __name__ == "__main__":
    limit_memory()
    sys.exit(main(sys.argv[1:]))
