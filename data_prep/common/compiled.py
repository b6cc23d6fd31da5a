"""Compiles the loops over single pieces with numba, once for every version of these sources.

numba keeps compiled code on the disk, but notices a change only in the file that a function stands in, not in those
that it calls into. So the folder that it is kept in is named after all our sources together.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
PREFIX = "cloze-numba-"


def compiled(function: Function) -> Function:
    """Compiles a function when it is first called, or takes what an earlier process compiled."""
    return cast(Function, numba.njit(cache=True)(function))


def _cache_folder() -> Path:
    """Makes a folder for what this version of the sources compiles, where it may; removes those of earlier versions."""
    here = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    for place in (here / "__pycache__", cache):
        folder = place / f"{PREFIX}{digest.hexdigest()[:16]}"
        try:
            if not folder.is_dir():
                for old in place.glob(f"{PREFIX}*"):
                    shutil.rmtree(old, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix=PREFIX))  # for this process alone


def nothing_compiled_yet() -> bool:
    """Tells whether first calls will take seconds to compile, so that a user can be told why a run begins slowly."""
    return not any(Path(numba.config.CACHE_DIR).rglob("*.nbi"))  # type: ignore[attr-defined, unused-ignore]


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(_cache_folder())  # type: ignore[attr-defined, unused-ignore]
