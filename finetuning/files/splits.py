"""Finds the files of a task's splits by name, and chooses rows that are held out where there is no dev split. Needs
Python alone, so that it runs on login nodes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from data_prep.common.errors import UserError, quote

PART = re.compile(r"-(\d{5})-of-(\d{5})")
"""The ending of a file that is one of several parts."""


def list_hub_names(split: str) -> tuple[str, str]:
    """Lists the names of a split's file, or of its parts, on the Hugging Face hub."""
    return f"{split}.parquet", f"{split}-*.parquet"


def find_splits(
    folder: Path, names: Mapping[str, Sequence[str]], needed: Sequence[str] = (), fetch: str = ""
) -> dict[str, list[Path]]:
    """Finds the files of every split in a folder, all parts of it; UserError where a `needed` split is missing.

    `names` has the patterns of each split's files; the first that matches is taken. `fetch` are the arguments of
    `fetch.py` that download the split, if it can.
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
    """Refuses a split with missing or surplus parts."""
    parts = [part for path in files if (part := PART.search(path.name))]
    count = int(parts[0][2]) if parts else 0
    if parts and [int(part[1]) for part in parts] != list(range(count)):
        raise UserError(f"{files[0]}: this is one of {count} files, but {len(parts)} are there; fetch them anew")
    return files


def name_files(splits: Mapping[str, Sequence[Path]]) -> str:
    """Makes the line that names the files: `reads RTE/train.tsv, RTE/dev.tsv`."""
    return "reads " + ", ".join(str(path) for paths in splits.values() for path in paths)


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
"""GLUE's names of the tasks, by those of the Hugging Face hub."""
LABELLED = ("train", "dev")
"""Prefixes of splits with labels; a task needs all of these splits."""
AX, AX_FOLDER = "ax", "AX"
"""The diagnostic set, an optional test split of MNLI."""


def list_splits(name: str) -> tuple[str, ...]:
    """Lists the splits of a task; their files are named SPLIT.tsv."""
    if name == AX:
        return (AX_FOLDER,)
    if name == "mnli":
        return ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
    return ("train", "dev", "test")


def normalize_name(name: str) -> str:
    """Normalizes the spelling of a task or folder: `SST-2` is sst2."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_task_folder(glue: Path, name: str) -> Path:
    """Finds the folder of a task in any spelling."""
    inside = sorted(glue.iterdir()) if glue.is_dir() else []
    found = (path for path in inside if normalize_name(path.name) == name and path.is_dir())
    return next(found, glue / FOLDERS.get(name, AX_FOLDER))


def list_file_names(name: str) -> dict[str, tuple[str, ...]]:
    """Lists the possible names of each split's file: GLUE's and the hub's."""
    return {split: (f"{split}.tsv", *list_hub_names(split.replace("dev", "validation"))) for split in list_splits(name)}


def find_task(glue: Path, name: str, is_trained: bool = False) -> dict[str, list[Path]]:
    """Finds the files of a task by split; UserError where a needed one is missing. A trained model needs dev alone."""
    fetch = f"glue --task {name} --out {quote(glue)}"
    return _find_needed(find_task_folder(glue, name), list_file_names(name), is_trained, fetch)


def _find_needed(
    folder: Path, names: Mapping[str, Sequence[str]], is_trained: bool, fetch: str = ""
) -> dict[str, list[Path]]:
    """Finds the files of a task, which needs train and dev; a trained model needs dev alone."""
    needed = [split for split in names if split.startswith(LABELLED) and not (is_trained and split == "train")]
    return find_splits(folder, names, needed, fetch)


def find_glue(folder: Path) -> tuple[str, ...]:
    """Lists the tasks of GLUE with files in a folder, be it one split alone."""
    return tuple(name for name in FOLDERS if find_splits(find_task_folder(folder, name), list_file_names(name)))


SWAG_FILES = {
    "train": ("train.csv", *list_hub_names("train"), *list_hub_names("regular/train")),
    "dev": ("val.csv", "dev.csv", *list_hub_names("validation"), *list_hub_names("regular/validation")),
    "test": ("test.csv", *list_hub_names("test"), *list_hub_names("regular/test")),
}
"""Names of SWAG's splits in the original and on the Hugging Face hub."""
NER_FILES = {
    "train": ("train.txt", "eng.train", *list_hub_names("train")),
    "dev": ("valid.txt", "dev.txt", "eng.testa", *list_hub_names("validation"), "valid.parquet"),
    "test": ("test.txt", "eng.testb", *list_hub_names("test")),
}
"""Names of CoNLL-2003's splits in copies, in the original and on the Hugging Face hub."""


def find_swag(folder: Path, is_trained: bool = False) -> dict[str, list[Path]]:
    """Finds the files of SWAG by split. A folder's only CSV under another name is train, of which a share is scored.
    UserError where a needed split is missing."""
    alone = sorted(folder.glob("*.csv"))
    if len(alone) == 1 and not find_splits(folder, SWAG_FILES):
        return {"train": alone}
    return _find_needed(folder, SWAG_FILES, is_trained, f"swag --out {quote(folder)}")


def find_ner(folder: Path, is_trained: bool = False) -> dict[str, list[Path]]:
    """Finds the files of CoNLL-2003, or of data with its file names, by split; UserError where a needed one is
    missing."""
    return _find_needed(folder, NER_FILES, is_trained)


def choose_held_out(place: Path, texts: Iterable[str], share: float, what: str) -> tuple[list[bool], str]:
    """Marks the texts of a file that are held out, at least one and not all, and returns a note that calls them `what`.

    The choice depends on hashes of the texts, not on their order: equal texts stay together, and added texts move few.
    """
    keys = [hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest() for text in texts]
    if len(keys) < 2:
        raise UserError(f"{place}: one row alone, of which none can be held out to be scored; add rows, or a dev split")
    count = min(max(1, round(share * len(keys))), len(keys) - 1)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    chosen = [key <= keys[order[count - 1]] for key in keys]  # equal texts stay together
    if all(chosen):
        held = {*order[:count]}
        chosen = [number in held for number in range(len(keys))]
    return chosen, f"{place}: {sum(chosen):,} of its {len(keys):,} {what} are held out from training and scored"
