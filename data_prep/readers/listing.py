"""Lists the files that paths, folders and globs name, and the kind of each, without opening any."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from data_prep.common.errors import UserError
from data_prep.common.files import absence
from data_prep.readers.foreign import NO_FILE, Foreign
from data_prep.readers.formats.parquet import describes_dataset
from data_prep.readers.reader import LEAVES_OUT, Problems, UnreadableError

HIDDEN, SET_ASIDE = ".", "_"  # how names begin of files and folders that are not read; those of the second are counted
ASIDE = "files and folders whose names begin with _"


@dataclass
class Listing:
    """The files that the arguments of one source name, in the order of their names."""

    files: dict[str, os.stat_result] = field(default_factory=dict)
    """The files with anything in them, by their paths."""
    foreign: dict[str, Foreign] = field(default_factory=dict)
    """Pipes, sockets and devices: opening one may never return."""
    unreadable: dict[str, UnreadableError] = field(default_factory=dict)
    """Links to nothing or in a circle, and folders that may not be listed."""
    aside: set[str] = field(default_factory=set)
    """Files and folders below the named ones, or found by a glob, whose names begin with `_`."""


def list_files(arguments: Iterable[str], out: Path | None, problems: Problems) -> Listing:
    """Lists what some arguments name, but for what lies in the output folder and files with nothing in them.

    Raises UnreadableError for what cannot be looked up, unless the user wants such left out.
    """
    listing, arguments = Listing(), list(arguments)
    if out is not None:
        _refuse_within(out, arguments)
    paths = {path for argument in arguments for path in _expand(argument, listing)}
    if out is not None and out.is_dir():  # wherever links lead
        whole = Path(os.path.realpath(out))
        paths = {path for path in paths if whole not in Path(os.path.realpath(path)).parents}
    for path in sorted(paths, key=lambda path: Path(path).parts):
        try:
            path.encode()
            status = os.stat(path)
        except UnicodeEncodeError:
            shown = path.encode(errors="backslashreplace").decode()
            listing.unreadable[shown] = UnreadableError(f"{shown}: the name is not UTF-8; rename it", LEAVES_OUT)
            continue
        except OSError as error:
            listing.unreadable[path] = _explain_unreadable(path, error)
            continue
        if not stat.S_ISREG(status.st_mode):
            listing.foreign[path] = NO_FILE
        elif status.st_size and not describes_dataset(Path(path)):
            listing.files[path] = status
    if listing.aside:
        problems.no_text[ASIDE] += len(listing.aside)
    if problems.policy != "skip":
        for fault in listing.unreadable.values():
            raise UserError(f"--docs: {fault}")
    return listing


def _refuse_within(out: Path, arguments: list[str]) -> None:
    """Raises UserError where the output folder lies in a folder that is read, so that it would become text itself."""
    whole = Path(os.path.realpath(out))  # resolve() fails where links go in a circle
    for argument in arguments:
        for found in [argument] if os.path.lexists(argument) else glob.glob(argument, recursive=True):
            place = Path(os.path.realpath(found))
            is_left_out = found != argument and place == whole  # an earlier run made it there
            if os.path.isdir(found) and place in (whole, *whole.parents) and not is_left_out:
                raise UserError(f"--out {out}: lies within --docs {argument}, which is read whole; name one beside it")


def _expand(path: str, listing: Listing) -> set[str]:
    """Lists the files of a path or glob, but for hidden ones and those with a _ first that it does not name."""
    found = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
    if not found:
        raise UserError(f"--docs {path}: {absence(Path(path), 'file or folder')}")
    files: set[str] = set()
    named = [part for part in Path(path).parts if part.startswith(SET_ASIDE)]
    for place in found:
        parts = [part for part in Path(place).parts if part.startswith(SET_ASIDE)]
        if place != path and not all(any(fnmatch(part, one) for one in named) for part in parts):
            listing.aside.add(place)
            continue
        files.update(_walk(place, listing) if os.path.isdir(place) else [str(Path(place))])
    if not files and not listing.unreadable:
        raise UserError(f"--docs {path}: an empty folder")
    return files


def _walk(top: str, listing: Listing) -> Iterator[str]:
    """Finds all files below a folder; goes only once into a folder that links lead to from several places."""

    def note(error: OSError) -> None:
        listing.unreadable[error.filename] = _explain_unreadable(error.filename, error)

    seen = set()
    for folder, folders, files in os.walk(Path(top), onerror=note, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen:
            folders[:] = []
            continue
        seen.add(place)
        listing.aside.update(str(Path(folder, name)) for name in (*folders, *files) if name.startswith(SET_ASIDE))
        folders[:] = sorted(name for name in folders if not name.startswith((HIDDEN, SET_ASIDE)))
        yield from (str(Path(folder, name)) for name in files if not name.startswith((HIDDEN, SET_ASIDE)))


def _explain_unreadable(path: str, error: OSError) -> UnreadableError:
    """Describes why a file or folder cannot be read."""
    broken = " (a link to nothing)" if isinstance(error, FileNotFoundError) and os.path.islink(path) else ""
    return UnreadableError(f"{path}: cannot be read: {error.strerror}{broken}", LEAVES_OUT)
