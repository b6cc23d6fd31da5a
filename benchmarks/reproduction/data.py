"""Files of tasks and pairs that the columns of a table read: where they are, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.reproduction.declaration import Column, Declared, flag_of
from data_prep.common.errors import UserError
from finetuning.files.splits import FOLDERS, LABELLED, find_ner, find_swag, find_task
from finetuning.session.flags import find_data

FINDERS: Mapping[str, Callable[[Path, str], dict[str, list[Path]]]] = {
    "glue": find_task,
    "swag": lambda place, _: find_swag(place),
    "ner": lambda place, _: find_ner(place),
}
"""What finds the files of a task as its command does."""
NO_TRIVIA = "no data: name the file to train on first, in SQuAD's format: --trivia"
"""What is said of a row that is fine-tuned on a file of the user's first, where none is named."""


def files_of(column: Column) -> dict[str, Path]:
    """The files that decide what a column shows, by names that are the same on all machines; UserError with the cure
    where one is missing."""
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


def missing(column: Column) -> str:
    """What is missing of the data of a column, with the cure; nothing where it is there."""
    try:
        files_of(column)
    except UserError as error:
        return str(error).removeprefix("--data: ")
    return ""


def lacking(declared: Declared) -> dict[str, str]:
    """The columns that cannot be measured here, with what is missing of their data."""
    found = {name: missing(column) for name, column in declared.measured.items()}
    return {name: lacks for name, lacks in found.items() if lacks}


def gaps(declared: Declared, trivia: Path | None) -> Iterator[str]:
    """Lines on what cannot be measured for want of data."""
    for name, lacks in lacking(declared).items():
        yield f"{declared.columns[name].title}: no data: {lacks}"
    for row in declared.rows if trivia is None else ():
        if row.before:
            yield f"{row.name}: {NO_TRIVIA}"


def check_trivia(declared: Declared, path: Path) -> None:
    """Refuses a file to train on first that is none of SQuAD's format, or that no row takes."""
    if not path.is_file():
        raise UserError(f"--trivia {path}: no such file")
    if not any(row.before for row in declared.rows):
        raise UserError(f"--trivia {path}: {flag_of(declared.name)} has no row that is fine-tuned on it first")
    with path.open("rb") as file:  # its ends alone: one of TriviaQA's has hundreds of MB
        begin = file.read(4096)
        file.seek(max(0, path.stat().st_size - 4096))
        if begin.lstrip()[:1] != b"{" or b'"data"' not in begin + file.read():
            raise UserError(f'--trivia {path}: not in SQuAD\'s format, an object of JSON with "data"')
