#!/usr/bin/env python3
"""Compares what models score on the same tasks: a line for each task, a column for each folder of results.

    python finetuning/compare.py runs/mini-from-scratch/glue runs/mini/glue

Beside a difference stands what chance alone may do, given how many items were scored. What is not alike has none: other
items, another figure, or the best of several runs against that of fewer.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.table import Table

from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.common.terminal import open_console
from finetuning.places import RESULTS

Result = Mapping[str, Any]
"""What results.json says of a task; nothing where it has no such task."""


@dataclass(frozen=True)
class Compare:
    """Compares the scores of the best runs, from the results.json of each folder."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders with results of run_glue.py, run_squad.py, run_swag.py, run_ner.py or run_task.py."""


def read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a command by their tasks."""
    folder = folder.parent if folder.name == RESULTS and folder.is_file() else folder
    try:
        results: dict[str, dict[str, Any]] = read_json(folder / RESULTS)
    except FileNotFoundError:
        raise UserError(f"{folder}: no {RESULTS}; name the folder that a command of finetuning/ had as --out") from None
    if isinstance(results, dict) and "metric" in results:
        raise UserError(f"{folder}: the results of one task or run alone; name the folder above it")
    if not isinstance(results, dict) or not results or not all(map(_is_result, results.values())):
        raise UserError(f"{folder / RESULTS}: no results of a command of finetuning/, or damaged; run it again")
    return results


def _is_result(task: Any) -> bool:
    """Whether something has the parts of a task's results that are read here."""
    if not isinstance(task, dict) or not isinstance(task.get("metric"), str) or not isinstance(task.get("runs"), dict):
        return False
    score, tables = task.get("score"), [task.get(name, {}) for name in ("scores", "spreads", "data")]
    if not all(isinstance(table, dict) for table in (*tables, *task["runs"].values())):
        return False
    if not all(isinstance(figures, dict) for table in tables[:2] for figures in table.values()):
        return False
    spreads = [figure for figures in tables[1].values() for figure in figures.values()]
    numbers = all(each is None or isinstance(each, (int, float)) for each in (score, *spreads))
    return numbers and (score is None or math.isfinite(score))


def compared(folders: tuple[Path, ...]) -> Group:
    """The scores of all tasks, in hundredths, with the distance from the first folder to the last, or why there is
    none."""
    if not folders:
        raise UserError(
            "no folder is named; name those that commands of finetuning/ had as --out:\n"
            "    python finetuning/compare.py runs/mini-from-scratch/glue runs/mini/glue"
        )
    every = [read_scores(folder) for folder in folders]
    table, notes = Table(box=None, pad_edge=False), []
    for name in ("task", "metric"):
        table.add_column(name)
    for name in [*distinct(folders), *["difference", "by chance"] * (len(folders) > 1)]:
        table.add_column(name, justify="right")
    for task in dict.fromkeys(task for results in every for task in results):
        found = [results.get(task, {}) for results in every]
        metric = next(result["metric"] for result in found if result)
        scores = [*map(_spelled, found), *(_difference(found[0], found[-1]) if len(folders) > 1 else ())]
        table.add_row(task, metric, *scores)
        for name, other in zip(distinct(folders)[1:], found[1:], strict=True):
            unlike = find_unlike(found[0], other)
            if unlike:
                of_them = f" ({name})" * (len(folders) > 2)
                notes.append(f"{task}: not alike{of_them}: {'; '.join(unlike)}")
    return Group(table, *notes)


def _spelled(result: Result) -> str:
    """The score of a task in a folder."""
    score = result.get("score")
    return "" if score is None else f"{100 * score:.1f}"


def _difference(first: Result, last: Result) -> tuple[str, str]:
    """How far two scores are apart, and what of it may be chance: the standard errors of both together. Models that
    were asked about the same items differ less by chance, so that it is rather too much."""
    before, after, spreads = first.get("score"), last.get("score"), [_spread(each) for each in (first, last)]
    if before is None or after is None or find_unlike(first, last):
        return "", ""
    difference = after - before
    if None in spreads:
        return f"{100 * difference:+.1f}", ""
    chance = math.hypot(*spreads)
    return f"{100 * difference:+.1f}", f"± {100 * chance:.1f}" + ", within it" * (abs(difference) <= chance)


def _spread(result: Result) -> Any:
    """The standard error of the score of a task; None in results of earlier versions."""
    split = next(iter(result.get("scores", {})), "")
    return result.get("spreads", {}).get(split, {}).get(result.get("metric", ""))


def find_unlike(first: Result, other: Result) -> list[str]:
    """What two results of a task do not have alike, so that their difference tells nothing of the models."""
    if first.get("score") is None or other.get("score") is None:
        return []
    faults = [f"{first['metric']} and {other['metric']}"] if first["metric"] != other["metric"] else []
    split = next(iter(first.get("scores", {})), "")
    items = [each.get("data", {}).get(split) for each in (first, other)]
    if None not in items and items[0] != items[1]:
        faults.append(f"other items in {split} ({items[0]}, and {items[1]})")
    runs = [sum(run.get("score") is not None for run in each["runs"].values()) for each in (first, other)]
    if runs[0] != runs[1]:
        faults.append(" and ".join("one run" if count == 1 else f"the best of {count} runs" for count in runs))
    return faults


def distinct(folders: tuple[Path, ...]) -> list[str]:
    """What the folders are called, without what all of them have alike."""
    names = [str(folder) for folder in folders]
    shared = os.path.commonpath(folders) if len({folder.is_absolute() for folder in folders}) == 1 else ""
    return [os.path.relpath(name, shared or None) for name in names] if len(set(names)) > 1 else names


def main(arguments: list[str]) -> int:
    """Prints the table; returns the exit code: 0, or 2 for what the user can cure."""
    command = tyro.cli(Compare, args=arguments, prog="compare.py")
    try:
        open_console(soft_wrap=True, markup=False, emoji=False).print(compared(command.folders))
    except (UserError, OSError) as error:
        open_console(stderr=True, markup=False, soft_wrap=True).print(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
