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
from dataclasses import dataclass
from typing import Annotated

import tyro

from data_prep.common.capacity import limit_memory
from data_prep.common.errors import UserError
from data_prep.common.terminal import open_console
from data_prep.inspection.lookup import Place, find_example
from data_prep.inspection.marking import heading, marked


@dataclass(frozen=True)
class Show:
    """Prints a training example: segments A and B, and what is masked, replaced or kept."""

    data: Annotated[Path, tyro.conf.Positional]
    """The folder that shard.py wrote or is writing."""
    length: int | None = None
    """Length of the examples (default: the shortest there is)."""
    index: int = 0
    """Which example, from 0."""
    duplicate: int = 0
    """Which masking duplicate."""
    validation: bool = False
    """An example of the documents held out."""


def main(arguments: list[str]) -> int:
    """Prints the example that the arguments name; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have all characters
    console, errors = open_console(soft_wrap=True), open_console(stderr=True, soft_wrap=True)
    wanted = tyro.cli(Show, args=arguments, prog="show.py", config=(tyro.conf.FlagCreatePairsOff,))
    place = Place(wanted.data, wanted.length, wanted.index, wanted.duplicate, wanted.validation)
    try:
        example, vocabulary = find_example(place)
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
