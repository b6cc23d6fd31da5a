"""The files that decide what comes of a command: recipes, text, and data of tasks; each with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import DATA
from benchmarks.reproduction.data import find_files
from benchmarks.reproduction.declaration import TableColumn
from data_prep.common.errors import UserError
from data_prep.common.files import sha256
from data_prep.common.reading import find_recipe
from data_prep.common.toml_text import read_toml
from finetuning.settings import FORM as FINE_TUNING
from pretraining.config.overrides import FORM as PRE_TRAINING

DIGITS = 16
"""Digits of a checksum that are kept."""
CHECKSUMS: dict[tuple[Path, int, int], str] = {}
"""Checksums of files that were read, by path, size and time."""
SHARD, TRAIN = "data_prep/shard.py", "pretraining/train.py"
RECIPES: Mapping[str, tuple[str, ...]] = {
    "finetuning/run_glue.py": ("glue", "miniature"),
    "finetuning/run_squad.py": ("squad1", "squad2"),
    "finetuning/run_swag.py": ("swag",),
    "finetuning/run_ner.py": ("ner", "ner_features"),
    "finetuning/run_task.py": ("own", "miniature"),
}
"""The recipes of which a command of fine-tuning takes one where none is named."""


def checksum_inputs(script: str, words: Sequence[str], reads: TableColumn | None) -> dict[str, str]:
    """The checksums of what a command reads, by names that are the same on all machines; `reads` is the column whose
    files it needs. A file that is not here has none."""
    found = {f"recipe {path.stem}": checksum_recipe(path) for path in find_recipes(script, words)}
    if script == SHARD:
        places = {word: Path(word.replace("{data}", str(DATA))) for word in words}
        found |= {f"text {word}": checksum for word, place in places.items() if (checksum := checksum_text(place))}
    with suppress(UserError):
        found |= {name: checksum_file(path) for name, path in (find_files(reads) if reads else {}).items()}
    return found


def find_recipes(script: str, words: Sequence[str]) -> Iterator[Path]:
    """The recipes that decide what comes of a command: that which it names, or those of which it takes one."""
    named = [word for flag, word in pairwise(words) if flag == "--recipe"]
    form = PRE_TRAINING if script == TRAIN else FINE_TUNING
    for name in named or RECIPES.get(script, ()):
        yield find_recipe(Path(name), form.folder)


def checksum_recipe(path: Path) -> str:
    """A checksum of what a recipe says, whatever its comments are."""
    return compute_checksum(json.dumps(read_toml(path.read_text(encoding="utf-8")), sort_keys=True, default=str))


@cache
def checksum_text(place: Path) -> str:
    """A checksum of the names and sizes of a file or a folder's files; empty where there are none."""
    paths = sorted(path for path in (place, *place.rglob("*")) if path.is_file())
    return compute_checksum(*(f"{path.relative_to(place)} {path.stat().st_size}" for path in paths)) if paths else ""


def compute_checksum(*texts: str) -> str:
    """A checksum of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:DIGITS]


def checksum_file(path: Path) -> str:
    """A checksum of a file, which is read again only when its size or its time has changed."""
    about = path.stat()
    known = (path, about.st_size, about.st_mtime_ns)
    if known not in CHECKSUMS:
        CHECKSUMS[known] = sha256(path)[:DIGITS]
    return CHECKSUMS[known]
