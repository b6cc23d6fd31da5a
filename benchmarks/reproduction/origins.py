"""What a command is made from: what other commands have made, recipes, and files of data; each with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.reproduction.data import files_of
from benchmarks.reproduction.steps import RECIPES, Kind, Step
from data_prep.common.codes import CHECKPOINT
from data_prep.common.files import read_table, sha256
from data_prep.common.reading import find_recipe
from data_prep.common.toml_text import read_toml
from data_prep.shards import MANIFEST
from finetuning.results import RESULTS
from finetuning.settings import FORM as FINE_TUNING
from pretraining.config.overrides import FORM as PRE_TRAINING

PRODUCTS: Mapping[Kind, str] = {
    "task": "package.toml",
    "shards": MANIFEST,
    "train": "export/config.json",
    "tune": RESULTS,
    "pairs": RESULTS,
}
"""The file that a command writes when it is done."""
DIGITS = 16
"""Digits of a checksum that are kept."""


class Version(NamedTuple):
    """A file as it was at a time, so that it is read again only when it has changed."""

    path: Path
    size: int
    changed: int
    """When it was changed, in nanoseconds."""

    @classmethod
    def of(cls, path: Path) -> Version:
        """The file as it is now."""
        about = path.stat()
        return cls(path, about.st_size, about.st_mtime_ns)


def is_made(step: Step, root: Path) -> bool:
    """Whether what a command makes is there."""
    return (root / step.name / PRODUCTS[step.kind]).is_file()


def identity_of(step: Step, root: Path) -> str:
    """A checksum of what a command has made: the data's fingerprint, a checkpoint's own checksum, or that of files."""
    folder = root / step.name
    if not is_made(step, root):
        return ""
    if step.kind == "shards":
        return str(read_table(folder / MANIFEST).get("fingerprint", ""))[:DIGITS]
    if step.kind == "train":
        newest = max((folder / "checkpoints").glob(f"step-*/{CHECKPOINT}"), default=None)
        return "" if newest is None else str(read_table(newest).get("sha256", ""))[:DIGITS]
    if step.kind == "task":
        return shortened(*(checksum_of(path) for path in sorted(folder.iterdir()) if path.is_file()))
    return checksum_of(folder / PRODUCTS[step.kind])


def origins_of(step: Step, root: Path) -> dict[str, str]:
    """What a command is made from, by names that are the same on all machines; no checksum of what is not here."""
    found = {need.name: identity_of(need, root) for need in step.needs}
    with suppress(ValueError, OSError):
        found |= {f"recipe {path.stem}": recipe_checksum(path) for path in recipes_of(step)}
    with suppress(ValueError, OSError):
        found |= {name: checksum_of(path) for name, path in (files_of(step.reads) if step.reads else {}).items()}
    return found


def recipes_of(step: Step) -> Iterator[Path]:
    """The recipes that decide what comes of a command: that which it names, or those of which it takes one."""
    if step.kind in ("train", "tune"):
        form = PRE_TRAINING if step.kind == "train" else FINE_TUNING
        named = [word for flag, word in pairwise(step.words) if flag == "--recipe"]
        for name in named or RECIPES[step.script]:
            yield find_recipe(Path(name), form.folder)


def recipe_checksum(path: Path) -> str:
    """A checksum of what a recipe says, whatever its comments are."""
    return _recipe_checksum(Version.of(path))


@cache
def _recipe_checksum(recipe: Version) -> str:
    content = read_toml(recipe.path.read_text(encoding="utf-8"))
    return shortened(json.dumps(content, sort_keys=True, default=str))


def shortened(*texts: str) -> str:
    """A checksum of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:DIGITS]


def checksum_of(path: Path) -> str:
    """A checksum of a file."""
    return _checksum(Version.of(path))


@cache
def _checksum(file: Version) -> str:
    return sha256(file.path)[:DIGITS]
