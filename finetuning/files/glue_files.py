"""What the files of GLUE are called: those that `fetch.py` writes, and `run_glue.py` finds."""

from __future__ import annotations

import re

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
