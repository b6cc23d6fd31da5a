"""The inputs of a command with their checksums: recipes, text, and the files of tasks and pairs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import find_data_folder
from benchmarks.reproduction.declaration import Declared, TableColumn
from data_prep.common.errors import UserError
from data_prep.common.files import sha256
from data_prep.common.reading import find_recipe
from data_prep.common.toml_text import read_toml
from finetuning.files.splits import FOLDERS, LABELLED, find_ner, find_swag, find_task
from finetuning.session.flags import find_data
from finetuning.settings import FORM as FINE_TUNING
from pretraining.config.overrides import FORM as PRE_TRAINING

DIGITS = 16
"""The number of digits of a checksum."""
CHECKSUMS: dict[tuple[Path, int, int], str] = {}
"""A cache of checksums, by path, size and modification time."""
SHARD, TRAIN = "data_prep/shard.py", "pretraining/train.py"
RECIPES: Mapping[str, tuple[str, ...]] = {
    "finetuning/run_glue.py": ("glue", "miniature"),
    "finetuning/run_squad.py": ("squad1", "squad2"),
    "finetuning/run_swag.py": ("swag",),
    "finetuning/run_ner.py": ("ner", "ner_features"),
    "finetuning/run_task.py": ("own", "miniature"),
}
"""The default recipes of a fine-tuning command, of which it takes one."""


def checksum_inputs(script: str, words: Sequence[str], reads: TableColumn | None) -> dict[str, str]:
    """Computes the checksums of what a command reads, by names that are equal on all machines. `reads` is the column
    whose files it needs. Missing files have none."""
    found = {f"recipe {path.stem}": checksum_recipe(path) for path in find_recipes(script, words)}
    if script == SHARD:
        places = {word: Path(word.replace("{data}", str(find_data_folder()))) for word in words}
        found |= {f"text {word}": checksum for word, place in places.items() if (checksum := checksum_text(place))}
    with suppress(UserError):
        found |= {name: checksum_file(path) for name, path in (find_files(reads) if reads else {}).items()}
    return found


def find_recipes(script: str, words: Sequence[str]) -> Iterator[Path]:
    """Yields the recipes of a command: the one that it names, or its default ones."""
    named = [word for flag, word in pairwise(words) if flag == "--recipe"]
    form = PRE_TRAINING if script == TRAIN else FINE_TUNING
    for name in named or RECIPES.get(script, ()):
        yield find_recipe(Path(name), form.folder)


def checksum_recipe(path: Path) -> str:
    """Computes the checksum of a recipe without its comments."""
    return compute_checksum(json.dumps(read_toml(path.read_text(encoding="utf-8")), sort_keys=True, default=str))


@cache
def checksum_text(place: Path) -> str:
    """Computes a checksum of the names and sizes of a folder's files, or of a file; empty if there are none."""
    paths = sorted(path for path in (place, *place.rglob("*")) if path.is_file())
    return compute_checksum(*(f"{path.relative_to(place)} {path.stat().st_size}" for path in paths)) if paths else ""


def compute_checksum(*texts: str) -> str:
    """Computes the checksum of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:DIGITS]


def checksum_file(path: Path) -> str:
    """Computes the checksum of a file, again only if its size or time has changed."""
    about = path.stat()
    known = (path, about.st_size, about.st_mtime_ns)
    if known not in CHECKSUMS:
        CHECKSUMS[known] = sha256(path)[:DIGITS]
    return CHECKSUMS[known]


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
