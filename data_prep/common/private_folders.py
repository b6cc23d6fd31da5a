"""Folders for compiled code that later processes load: whoever can write there runs code as this user."""

from __future__ import annotations

import grp
import os
import pwd
import secrets
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from data_prep.common.errors import UserError, printable
from data_prep.common.launchers import find_world


def cache_home() -> Path:
    """The folder that a user has for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def temporary_home() -> Path:
    """Finds a folder for temporary files in which other users cannot rename files: the usual one, /tmp or /var/tmp.

    Raises PermissionError if they can in all three, which lack the sticky bit.
    """
    for home in (Path(place).resolve() for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")):
        with suppress(PermissionError):
            require_private(home / secrets.token_hex(8))
            if os.access(home, os.W_OK | os.X_OK):
                return home
    raise PermissionError(f"{tempfile.gettempdir()}: other users can rename files there (chmod +t), and in /tmp")


def keep_compiled(variable: str, folder: Path) -> None:
    """Moves a library's cache of compiled code to a new private folder if other users can write to its usual folder, or
    this one cannot.

    `variable` is the environment variable by which the library takes another folder. A value that a user has set stays.
    """
    if variable not in os.environ:
        try:
            if not os.access(open_private(folder), os.W_OK):
                raise PermissionError(f"{folder}: cannot be written")
        except OSError as error:
            os.environ[variable] = tempfile.mkdtemp(prefix="cloze-", dir=temporary_home())
            tell_refusal(f"{error}; what is compiled is kept in {os.environ[variable]}")


def open_private(folder: Path) -> Path:
    """Returns the real path of a folder that only this user (and root) can have written; makes it where it is missing.

    Raises PermissionError where somebody else could have written it, and OSError where it cannot be made.
    """
    if not folder.is_absolute():  # such as ~ where nobody says what that is
        raise FileNotFoundError(f"{folder}: no absolute path")
    folder = folder.resolve()  # used from here on: who can turn a link elsewhere gains nothing
    require_private(folder)
    for missing in [place for place in (*reversed(folder.parents), folder) if not place.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)  # another rank may have made it by now
    require_private(folder)
    return folder


def require_private(path: Path) -> None:
    """Raises PermissionError where somebody but this user and root can have written what lies at an absolute path.

    A folder above it may belong to a group of this user alone, or be a sticky one such as /tmp, in which nobody else
    can replace what is this user's. What is not there yet is nobody's.
    """
    ours = {os.geteuid(), 0}
    for place in (path, *path.parents):
        with suppress(FileNotFoundError):
            found, above = place.lstat(), place != path
            if found.st_uid not in (ours | _unmapped() if above else ours):
                raise PermissionError(f"{place}: belongs to another user ({found.st_uid})")
            others = stat.S_IWOTH if above and _is_own_group(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
            if found.st_mode & others and not (above and found.st_mode & stat.S_ISVTX):
                cure = "chmod go-w" if above else "remove it"
                raise PermissionError(f"{place}: other users can write it ({cure})")


def tell_refusal(text: str) -> None:
    """Prints a warning, on the first rank of each machine."""
    with suppress(UserError):  # which launchers that say too little are told where ranks meet
        if find_world(os.environ).local_rank:
            return
    print(printable(f"warning: {text}"), file=sys.stderr, flush=True)


def _is_own_group(number: int) -> bool:
    """Whether a group is that of this user alone, as many systems give each one, and let it write all by default."""
    with suppress(KeyError):
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
        return (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name) and {*group.gr_mem} <= {user.pw_name}
    return False


def _unmapped() -> set[int]:
    """Who stands for root, and for all others without a number, in a container that numbers this user alone."""
    with suppress(OSError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return set()
