"""The splits of a task: their files, found by what they may be called; with Python alone, for login nodes too."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.common.errors import UserError

PART = re.compile(r"-(\d{5})-of-(\d{5})")
"""What the name of a file says that is one of several."""


def on_the_hub(split: str) -> tuple[str, str]:
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
            found[split] = _whole(files)
        elif split in needed:
            there = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
            called = " nor ".join(patterns)
            cure = f"; python finetuning/fetch.py {fetch} fetches it" * bool(fetch)
            raise UserError(f"{folder}: the {split} split is missing: neither {called}; there is {there}{cure}")
    return found


def _whole(files: list[Path]) -> list[Path]:
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
