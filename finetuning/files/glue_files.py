"""The files of GLUE: those that `fetch.py` writes, and that `run_glue.py` and `submit.py` find; with Python alone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from finetuning.files.splits import find_splits, on_the_hub

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


def splits_of(name: str) -> tuple[str, ...]:
    """The splits that a task has; `.tsv` ends the names of their files."""
    if name == AX:
        return (AX_FOLDER,)
    if name == "mnli":
        return ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
    return ("train", "dev", "test")


def plain(name: str) -> str:
    """The name of a task or folder as all spellings of it have it: `SST-2` is sst2."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def task_folder(glue: Path, name: str) -> Path:
    """The folder of a task, however it is spelled."""
    inside = sorted(glue.iterdir()) if glue.is_dir() else []
    found = (path for path in inside if plain(path.name) == name and path.is_dir())
    return next(found, glue / FOLDERS.get(name, AX_FOLDER))


def file_names(name: str) -> dict[str, tuple[str, ...]]:
    """What the files of every split may be called: by GLUE, and on the hub."""
    return {split: (f"{split}.tsv", *on_the_hub(split.replace("dev", "validation"))) for split in splits_of(name)}


def find_task(glue: Path, name: str, is_trained: bool = False) -> dict[str, list[Path]]:
    """The files of a task by its splits; UserError where one is missing that it needs, which is dev alone for a model
    that is trained already."""
    names = file_names(name)
    needed = [split for split in names if split.startswith(LABELLED) and not (is_trained and split == "train")]
    return find_splits(task_folder(glue, name), names, needed, f"glue --task {name} --out {shlex.quote(str(glue))}")
