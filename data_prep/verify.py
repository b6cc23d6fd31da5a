#!/usr/bin/env python3
"""Checks a folder of shards: every checksum, count and schema, and that every example is well formed.

    python data_prep/verify.py data/wiki

Exits with 0 if all is right, with 1 naming each damaged file, with 2 if there is nothing to check, and with 3 if what
is there is right but the folder is not finished.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

from dataclasses import dataclass
from typing import Annotated

import tyro

from data_prep.common.capacity import limit_memory
from data_prep.common.errors import DamageError, UserError
from data_prep.common.flags import read_flags
from data_prep.common.terminal import open_console
from data_prep.inspection.integrity import find_faults_in_finished, find_faults_in_unfinished
from data_prep.shards import Manifest, is_unfinished

FINE, DAMAGED, UNUSABLE, UNFINISHED = 0, 1, 2, 3


@dataclass(frozen=True)
class Verify:
    """Checks a folder of shards: every checksum, count and schema, and that every example is well formed."""

    data: Annotated[Path, tyro.conf.Positional]
    """The folder that shard.py wrote."""


def main(arguments: list[str]) -> int:
    """Checks the folder that the arguments name and prints what is wrong with it; returns the exit code."""
    console, errors = open_console(soft_wrap=True), open_console(stderr=True, soft_wrap=True)
    folder = read_flags(Verify, arguments, "verify.py", "preparation").data
    try:
        if is_unfinished(folder):
            state, faults = UNFINISHED, list(find_faults_in_unfinished(folder, console))
        else:
            state, faults = FINE, list(find_faults_in_finished(folder, Manifest.read(folder), console))
    except (UserError, OSError) as error:
        errors.print(f"error: {error}", markup=False)
        return DAMAGED if isinstance(error, DamageError) else UNUSABLE
    for fault in faults:
        errors.print(f"damaged: {fault}", markup=False)
    if faults:
        errors.print("remove the folder and make it anew with shard.py")
        return DAMAGED
    console.print("all is right" if state == FINE else "what is there is right; run shard.py again to finish it")
    return state


if __name__ == "__main__":
    limit_memory()
    sys.exit(main(sys.argv[1:]))
