"""The splits of a task: their files, found by what they may be called. It takes Python alone, for login nodes too."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.common.errors import UserError

PART = re.compile(r"-(\d{5})-of-(\d{5})")
"""What the name of a file says that is one of several."""


def list_hub_names(split: str) -> tuple[str, str]:
    """What the Hugging Face hub calls the file of a split, or the parts of it."""
    return f"{split}.parquet", f"{split}-*.parquet"


def find_splits(
    folder: Path, names: Mapping[str, Sequence[str]], needed: Sequence[str] = (), fetch: str = ""
) -> dict[str, list[Path]]:
    """The files of every split that is in a folder, all parts of it; UserError where one that is `needed` is not.

    `names` says what the files of a split may be called, as patterns; the first that fits is taken. `fetch` is what
    `fetch.py` is told to get the split from the web, where it can.
    """
    found = {}
    for split, patterns in names.items():
        files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in patterns)), [])
        if files:
            found[split] = _require_all_parts(files)
        elif split in needed:
            there = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
            called = " nor ".join(patterns)
            cure = f"; python finetuning/fetch.py {fetch} fetches it" * bool(fetch)
            raise UserError(f"{folder}: the {split} split is missing: neither {called}; there is {there}{cure}")
    return found


def _require_all_parts(files: list[Path]) -> list[Path]:
    """Refuses parts of a split of which some are missing, or too many."""
    parts = [part for path in files if (part := PART.search(path.name))]
    count = int(parts[0][2]) if parts else 0
    if parts and [int(part[1]) for part in parts] != list(range(count)):
        raise UserError(f"{files[0]}: this is one of {count} files, but {len(parts)} are there; fetch them anew")
    return files


def name_files(splits: Mapping[str, Sequence[Path]]) -> str:
    """One line for the user on what is read: `reads train.tsv, dev.tsv of data/glue/RTE`."""
    ends = ((paths[0], [*dict.fromkeys((paths[0].name, paths[-1].name))]) for paths in splits.values())
    by_folder = itertools.groupby(ends, lambda each: each[0].parent)
    return "reads " + "; ".join(
        f"{', '.join(' to '.join(names) for _, names in group)} of {folder}" for folder, group in by_folder
    )


FOLDERS = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "qqp": "QQP",
    "stsb": "STS-B",
    "mnli": "MNLI",
    "qnli": "QNLI",
    "rte": "RTE",
    "wnli": "WNLI",
}
"""What GLUE calls the tasks, by the names that the Hugging Face hub has for them."""
LABELLED = ("train", "dev")
"""What the names of splits with labels begin with; a task needs all of these."""
AX, AX_FOLDER = "ax", "AX"
"""The diagnostic set, which is a test split of MNLI where it is there."""


def list_splits(name: str) -> tuple[str, ...]:
    """The splits that a task has; `.tsv` ends the names of their files."""
    if name == AX:
        return (AX_FOLDER,)
    if name == "mnli":
        return ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
    return ("train", "dev", "test")


def normalize_name(name: str) -> str:
    """The name of a task or folder as all spellings of it have it: `SST-2` is sst2."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_task_folder(glue: Path, name: str) -> Path:
    """The folder of a task, however it is spelled."""
    inside = sorted(glue.iterdir()) if glue.is_dir() else []
    found = (path for path in inside if normalize_name(path.name) == name and path.is_dir())
    return next(found, glue / FOLDERS.get(name, AX_FOLDER))


def list_file_names(name: str) -> dict[str, tuple[str, ...]]:
    """What the files of every split may be called: by GLUE, and on the hub."""
    return {split: (f"{split}.tsv", *list_hub_names(split.replace("dev", "validation"))) for split in list_splits(name)}


def find_task(glue: Path, name: str, is_trained: bool = False) -> dict[str, list[Path]]:
    """The files of a task by its splits; UserError where one is missing that it needs, which is dev alone for a model
    that is trained already."""
    names = list_file_names(name)
    needed = [split for split in names if split.startswith(LABELLED) and not (is_trained and split == "train")]
    return find_splits(
        find_task_folder(glue, name), names, needed, f"glue --task {name} --out {shlex.quote(str(glue))}"
    )


SWAG_FILES = {
    "train": ("train.csv", *list_hub_names("train"), *list_hub_names("regular/train")),
    "dev": ("val.csv", "dev.csv", *list_hub_names("validation"), *list_hub_names("regular/validation")),
    "test": ("test.csv", *list_hub_names("test"), *list_hub_names("regular/test")),
}
"""What the splits of SWAG are called in the original and on the Hugging Face hub."""
NER_FILES = {
    "train": ("train.txt", "eng.train", *list_hub_names("train")),
    "dev": ("valid.txt", "dev.txt", "eng.testa", *list_hub_names("validation"), "valid.parquet"),
    "test": ("test.txt", "eng.testb", *list_hub_names("test")),
}
"""What the splits of CoNLL-2003 are called: in copies, in the original, on the Hugging Face hub."""


def find_swag(folder: Path, is_trained: bool = False) -> dict[str, list[Path]]:
    """The files of SWAG by their splits, or a folder's only CSV as train, of which a share is scored then; UserError
    where a split is missing that it needs."""
    alone = sorted(folder.glob("*.csv"))
    if len(alone) == 1 and not find_splits(folder, SWAG_FILES):
        return {"train": alone}
    return find_splits(folder, SWAG_FILES, list_needed(is_trained), f"swag --out {shlex.quote(str(folder))}")


def find_ner(folder: Path, is_trained: bool = False) -> dict[str, list[Path]]:
    """The files of CoNLL-2003, or of what has its names, by their splits; UserError where one is missing that it
    needs."""
    return find_splits(folder, NER_FILES, list_needed(is_trained))


def list_needed(is_trained: bool) -> tuple[str, ...]:
    """The splits that a task needs: dev alone for a model that is trained already."""
    return ("dev",) if is_trained else ("train", "dev")
