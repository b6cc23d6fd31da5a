"""Compiles the loops over single pieces with numba, once for every version of these sources.

numba keeps compiled code on the disk, but notices a change only in the file that a function stands in, not in those
that it calls into. So the folder that it is kept in is named after all our sources together.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba

from data_prep.common.private_folders import (
    cache_home,
    open_private,
    require_private,
    shared_home,
    tell_refusal,
    temporary_home,
)

Function = TypeVar("Function", bound=Callable[..., Any])
PREFIX = "cloze-numba-"
SOURCES = Path(__file__).parent.parent


def compiled(function: Function) -> Function:
    """Compiles a function when it is first called, or takes what an earlier process compiled."""
    return cast(Function, numba.njit(cache=True)(function))


@functools.cache
def _version() -> str:
    """Names what is compiled from: these sources, by this numba."""
    digest = hashlib.sha256(numba.__version__.encode())
    depths = ("*.py", "[!_]*/*.py", "[!_]*/[!_]*/*.py")  # no look at what others delete meanwhile
    for path in sorted(path for depth in depths for path in SOURCES.glob(depth)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """Makes a folder for what this version of the sources compiles, where it may; removes those of earlier versions.

    numba loads pickles from it, so nobody else may have written there.
    """
    name, refusal = f"{PREFIX}{_version()}", ""
    for place in (SOURCES / "__pycache__", cache_home(), shared_home()):
        folder = place / name
        try:
            require_private(place.resolve() / name)  # a group of this user alone may write where it lies
            if not folder.is_dir():
                for old in place.glob(f"{PREFIX}*"):
                    if old != folder:  # another process may have made it by now
                        shutil.rmtree(old, ignore_errors=True)
            folder = open_private(folder)
        except OSError as error:
            refusal = str(error)
            continue
        if os.access(folder, os.W_OK):
            break
    else:
        refusal = refusal or f"{folder}: cannot be written"
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary_home()))
    if refusal and (name in refusal or folder.name != name):  # a clone that is another's is nothing to tell of
        os.environ["NUMBA_CACHE_DIR"] = str(folder)  # for the workers of this process too
        tell_refusal(f"{refusal}; what numba compiles is kept in {folder}")
    return folder


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


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(_cache_folder())  # type: ignore[attr-defined, unused-ignore]


@compiled
def copy_items(target, at, source, start, stop):  # type: ignore[no-untyped-def]
    """Copies source[start:stop] to target[at:]; for compiled code, as numba takes seconds to compile such slices."""
    for index in range(start, stop):
        target[at + index - start] = source[index]
