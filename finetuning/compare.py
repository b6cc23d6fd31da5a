#!/usr/bin/env python3
"""Compares what models score on the same tasks: a line for each task, a column for each folder of results.

    python finetuning/compare.py runs/mini-from-scratch/glue runs/mini/glue

Below the tasks of GLUE stand their averages, where a folder has all of them. Beside a difference stands what chance
alone may do, given how many items were scored. What is not alike has none: other items, another figure, or the best of
several runs against that of fewer.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import tyro
from pydantic import TypeAdapter, ValidationError
from rich.console import Group
from rich.table import Table

from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.common.flags import read_flags
from data_prep.common.terminal import make_table, open_console, run_curable
from finetuning.averages import TaskAverage, compute_averages
from finetuning.results import AVERAGES, RESULTS, TaskResult, format_percent

RESULTS_OF_TASKS = TypeAdapter(dict[str, TaskResult])


@dataclass(frozen=True)
class Compare:
    """Compares the scores of the best runs, from the results.json of each folder."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders with results of run_glue.py, run_squad.py, run_swag.py, run_ner.py or run_task.py."""


def read_results(folder: Path) -> dict[str, TaskResult]:
    """Reads the results of a command, by task."""
    folder = folder.parent if folder.name == RESULTS and folder.is_file() else folder
    try:
        content = read_json(folder / RESULTS)
    except FileNotFoundError:
        raise UserError(f"{folder}: no {RESULTS}; name the folder that a command of finetuning/ had as --out") from None
    if isinstance(content, dict):
        content.pop(AVERAGES, None)
    with suppress(ValidationError):
        results = RESULTS_OF_TASKS.validate_python(content)
        if results:
            return results
    raise UserError(
        f"{folder / RESULTS}: no results of a command of finetuning/, or damaged\n"
        "run it again; of one task or run alone, name the folder above it"
    )


def build_table(folders: tuple[Path, ...]) -> Group:
    """Builds the table of all scores, in hundredths, with the difference between the first and the last folder, or the
    reason why there is none."""
    if not folders:
        raise UserError("name folders with results: python finetuning/compare.py runs/one/glue runs/other/glue")
    every, names = [read_results(folder) for folder in folders], shorten_names(folders)
    has_baseline = any(result.baseline for results in every for result in results.values())
    figures = [*["baseline"] * has_baseline, *names, *["difference", "by chance"] * (len(folders) > 1)]
    table, notes = make_table("task", "metric", *(f">{name}" for name in figures)), []
    for task in dict.fromkeys(task for results in every for task in results):
        found = [results.get(task) for results in every]
        first = next(filter(None, found))
        metric, baselines = first.metric, (result.baseline for result in found if result and result.baseline)
        alike = (each.get_score(metric) for each in baselines if each.data.items() <= first.data.items())
        cheaper = [format_percent(next(alike, None))] * has_baseline
        table.add_row(task, metric, *cheaper, *_spell_scores(found, bool(find_unlike(found[0], found[-1]))))
        for name, other in zip(names[1:], found[1:], strict=True):
            unlike = find_unlike(found[0], other)
            if unlike:
                notes.append(f"{task}: not alike ({name}): {'; '.join(unlike)}")
    add_averages(table, every, [""] * has_baseline)
    return Group(table, *notes)


def add_averages(table: Table, every: list[dict[str, TaskResult]], blank: list[str]) -> None:
    """Adds rows for GLUE's averages where a folder has them; a folder that lacks a task of one has no number there.
    `blank`: the cells before the scores."""
    unlike = any(find_unlike(every[0].get(task), result) for task, result in every[-1].items())
    for row in zip(*map(compute_averages, every), strict=True):
        if any(average.score is not None for average in row):
            table.add_row(row[0].name, "", *blank, *_spell_scores(row, unlike))


def _spell_scores(found: Sequence[TaskResult | TaskAverage | None], unlike: bool) -> list[str]:
    """Spells the scores of all folders and, of several, the difference of the last from the first with its standard
    error, which is rather too large for models that were asked about the same items."""
    cells = [format_percent(each.score if each else None) for each in found]
    if len(found) < 2:
        return cells
    first, last = found[0], found[-1]
    if not first or not last or first.score is None or last.score is None or unlike:
        return [*cells, "", ""]
    difference = last.score - first.score
    cells.append(f"{100 * difference:+.1f}")
    if first.chance is None or last.chance is None:
        return [*cells, ""]
    chance = math.hypot(first.chance, last.chance)
    return [*cells, f"± {100 * chance:.1f}" + ", within it" * (abs(difference) <= chance)]


def find_unlike(first: TaskResult | None, other: TaskResult | None) -> list[str]:
    """Lists why two results cannot be compared: other items, another metric, or another number of runs."""
    if not first or not other or first.score is None or other.score is None:
        return []
    faults = [f"{first.metric} and {other.metric}"] if first.metric != other.metric else []
    split = first.first_split
    items = [each.data.get(split) for each in (first, other)]
    if None not in items and items[0] != items[1]:
        faults.append(f"other items in {split} ({items[0]}, and {items[1]})")
    runs = [sum(run.score is not None for run in each.runs.values()) for each in (first, other)]
    if runs[0] != runs[1]:
        faults.append(" and ".join("one run" if count == 1 else f"the best of {count} runs" for count in runs))
    return faults


def shorten_names(folders: tuple[Path, ...]) -> list[str]:
    """Returns the names of the folders without the parts that all of them share."""
    names = [str(folder) for folder in folders]
    shared = os.path.commonpath(folders) if len({folder.is_absolute() for folder in folders}) == 1 else ""
    return [os.path.relpath(name, shared or None) for name in names] if len(set(names)) > 1 else names


def main(arguments: list[str]) -> int:
    """Prints the table; returns the exit code: 0, or 2 for what the user can cure."""
    command = read_flags(Compare, arguments, "compare.py", "finetuning")
    console = open_console(soft_wrap=True, markup=False, emoji=False)
    return run_curable(lambda: console.print(build_table(command.folders)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
