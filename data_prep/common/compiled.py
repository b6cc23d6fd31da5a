"""Compiles the loops over single pieces with numba, once for every version of these sources.

numba keeps compiled code on the disk, but notices a change only in the file that a function stands in, not in those
that it calls into. So the folder that it is kept in is named after all our sources together.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba

from data_prep.common.private_folders import cache_home, keep_compiled

Function = TypeVar("Function", bound=Callable[..., Any])
VARIABLE = "NUMBA_CACHE_DIR"
SOURCES = Path(__file__).parent.parent


def compiled(function: Function) -> Function:
    """Compiles a function when it is first called, or takes what an earlier process compiled."""
    return cast(Function, numba.njit(cache=True)(function))


@functools.cache
def _version() -> str:
    """Names what is compiled from: these sources, by this numba."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def keep_compiled_here() -> None:
    """Keeps what these sources compile in a folder of this user's caches, and removes that of earlier versions of them.

    numba loads pickles from it, so nobody else may have written there.
    """
    clone = hashlib.sha256(os.fsencode(SOURCES.resolve())).hexdigest()[:16]
    folder = cache_home() / "cloze" / "numba" / clone / _version()
    is_new = not folder.is_dir()
    keep_compiled(VARIABLE, folder)
    if is_new and VARIABLE not in os.environ:
        for old in {*folder.parent.iterdir()} - {folder}:
            shutil.rmtree(old, ignore_errors=True)
    numba.config.CACHE_DIR = os.environ.get(VARIABLE) or str(folder)  # type: ignore[attr-defined, unused-ignore]


def compiled_before(kinds: str) -> bool:
    """Tells whether an earlier run, of this version, compiled all that it needs for these kinds of data."""
    return _mark(kinds).exists()


def remember_compiled(kinds: str) -> None:
    """Notes that all is compiled for these kinds of data, where the folder for that can be written to."""
    with suppress(OSError):
        _mark(kinds).parent.mkdir(parents=True, exist_ok=True)
        _mark(kinds).touch()


def _mark(kinds: str) -> Path:
    """Names the file that stands for all that is compiled for some kinds of data and this kind of processor.

    Processors of several kinds may share the folder, in which numba tells apart what it compiled for each.
    """
    name = hashlib.sha256(f"{kinds} {llvmlite.binding.get_host_cpu_name()}".encode()).hexdigest()[:16]
    return Path(numba.config.CACHE_DIR) / f"compiled-{_version()}-{name}"  # type: ignore[attr-defined, unused-ignore]


keep_compiled_here()


@compiled
def copy_items(target, at, source, start, stop):  # type: ignore[no-untyped-def]
    """Copies source[start:stop] to target[at:]; for compiled code, as numba takes seconds to compile such slices."""
    for index in range(start, stop):
        target[at + index - start] = source[index]
