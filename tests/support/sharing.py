"""What takes long to make and no test changes, made once for all processes that share the tests."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(own: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name, beside the process's `own`; the process that asks first makes it, the others wait."""
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, made = root / name, root / f"{name} is made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
                make(folder)
                made.touch()
        finally:  # closing does not, where a process that was forked meanwhile goes on
            fcntl.flock(lock, fcntl.LOCK_UN)
    return folder
