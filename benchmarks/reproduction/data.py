"""The files of tasks and pairs that the columns of a table read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.reproduction.declaration import Declared, TableColumn
from data_prep.common.errors import UserError
from finetuning.files.splits import FOLDERS, LABELLED, find_ner, find_swag, find_task
from finetuning.session.flags import find_data

FINDERS: Mapping[str, Callable[[Path, str], dict[str, list[Path]]]] = {
    "glue": find_task,
    "swag": lambda place, _: find_swag(place),
    "ner": lambda place, _: find_ner(place),
}
"""Functions that find the files of a task as its command does."""


def find_files(column: TableColumn) -> dict[str, Path]:
    """Finds the files that a column reads, by names that are equal on all machines. Raises UserError with the cure if
    one is missing."""
    if column.entry in FINDERS:
        place = find_data(None, column.entry, column.cure)
        folder = f"glue/{FOLDERS[column.task]}" if column.entry == "glue" else column.entry
        splits = FINDERS[column.entry](place, column.task)
        labelled = [path for split, paths in splits.items() if split.startswith(LABELLED) for path in paths]
        return {f"{folder}/{path.name}": path for path in labelled}
    found: dict[str, Path] = {}
    for pattern in column.files:
        folder, _, name = pattern.partition("/")
        place = find_data(None, folder, column.cure)
        files = {f"{folder}/{path.name}": path for path in sorted(place.glob(name)) if path.is_file()}
        if not files:
            raise UserError(f"{place}: no {name}; {column.cure}")
        found |= files
    return found


def find_missing(column: TableColumn) -> str:
    """Describes missing data of a column, with the cure; empty if it is complete."""
    try:
        find_files(column)
    except UserError as error:
        return str(error).removeprefix("--data: ")
    return ""


def find_lacking(declared: Declared) -> dict[str, str]:
    """Returns the columns whose data is missing, with descriptions."""
    found = {name: find_missing(column) for name, column in declared.measured.items()}
    return {name: lacks for name, lacks in found.items() if lacks}
