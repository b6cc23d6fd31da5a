#!/usr/bin/env python3
"""Compares what models score on the same tasks: a line for each task, a column for each folder of results.

python finetuning/compare.py runs/mini-from-scratch/glue runs/mini/glue
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.common.terminal import open_console
from finetuning.places import RESULTS


@dataclass(frozen=True)
class Compare:
    """Compares the scores of the best runs, from the results.json of each folder."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders with results of run_glue.py, run_squad.py, run_swag.py, run_ner.py or run_task.py."""


def read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a command by their tasks."""
    try:
        results: dict[str, dict[str, Any]] = read_json(folder / RESULTS)
    except FileNotFoundError:
        raise UserError(f"{folder}: no {RESULTS}; name the folder that a command of finetuning/ had as --out") from None
    if not all(isinstance(task, dict) and "metric" in task for task in results.values()):
        raise UserError(f"{folder}: the results of one task or run alone; name the folder above it")
    return results


def compared(folders: tuple[Path, ...]) -> Table:
    """The scores of all tasks, in hundredths, with the distance from the first folder to the last."""
    every = [read_scores(folder) for folder in folders]
    table = Table(box=None, pad_edge=False)
    for name in ("task", "metric"):
        table.add_column(name)
    for name in [*distinct(folders), *["difference"] * (len(folders) > 1)]:
        table.add_column(name, justify="right")
    for task in dict.fromkeys(task for results in every for task in results):
        scores: list[float | None] = [results.get(task, {}).get("score") for results in every]
        first, last = scores[0], scores[-1]
        change = "" if first is None or last is None else f"{100 * (last - first):+.1f}"
        metric = next(results[task]["metric"] for results in every if task in results)
        table.add_row(
            task,
            metric,
            *("" if score is None else f"{100 * score:.1f}" for score in scores),
            *[change] * (len(folders) > 1),
        )
    return table


def distinct(folders: tuple[Path, ...]) -> list[str]:
    """What the folders are called, without what all of them have alike."""
    names = [str(folder) for folder in folders]
    shared = os.path.commonpath(folders) if len({folder.is_absolute() for folder in folders}) == 1 else ""
    return [os.path.relpath(name, shared or None) for name in names] if len(set(names)) > 1 else names


def main(arguments: list[str]) -> int:
    """Prints the table; returns the exit code: 0, or 2 for what the user can cure."""
    command = tyro.cli(Compare, args=arguments, prog="compare.py")
    try:
        open_console(soft_wrap=True).print(compared(command.folders))
    except UserError as error:
        open_console(stderr=True, markup=False, soft_wrap=True).print(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
