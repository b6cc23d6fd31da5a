"""Keeps a second run out of a folder in which one is at work, so that two runs never write the same files."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from data_prep.common.errors import UserError, describe_failure
from data_prep.common.files import open_at_once, refuse_link, writable

LOCK = "lock"
"""What the file is called in the folder of a run."""
FLOCK = struct.Struct("hhqqi")
"""A lock of POSIX, as Linux has it: kind, whence, start, length, process."""


class HeldError(UserError):
    """Another process holds the lock."""


@contextmanager
def locked(
    path: Path, place: str, refusal: str, patience: float = 0.0, pause: Callable[[], None] = lambda: time.sleep(0.2)
) -> Iterator[bool]:
    """Holds the lock file at `path`, whose folder it makes, and names this process in it.

    Raises HeldError where another process holds the file and still does after `patience` seconds, in which it calls
    `pause` again and again, and UserError where it cannot be written. `place` is what the user calls the folder;
    `refusal` tells the user what is wrong and what helps, with {owner} for the process that has the lock. Yields
    whether the file system has locks at all: some network file systems are mounted without, and a run goes on
    unprotected.

    The lock is one of POSIX: it belongs to this process alone, so it ends with the process however that ends, even
    where a child of the process lives on. A second lock of the same process is not refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", opener=refuse_link)  # noqa: SIM115
    except OSError as error:
        why = f"{path.name} is a symbolic link" if path.is_symlink() else describe_failure(error)
        raise UserError(f"{place}: cannot be written: {why}") from error
    deadline = time.monotonic() + patience
    with file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                protected = True
            except (BlockingIOError, PermissionError):  # POSIX lets a file system answer with either
                if time.monotonic() < deadline:
                    pause()
                    continue
                file.seek(0)
                owner = file.read().partition("\n")[0] or "another process"
                raise HeldError(f"{place}: {refusal.format(owner=owner)}") from None
            except OSError:
                protected = False
            break
        with writable(place):
            os.ftruncate(file.fileno(), 0)
            said = f"process {os.getpid()} on {socket.gethostname()}\n{secrets.token_hex(8)}\n"
            os.write(file.fileno(), said.encode())
            os.fsync(file.fileno())  # other machines may read it
        yield protected


def find_holder(path: Path) -> str | None:
    """Finds the process that holds a lock file, by reading alone. None where nobody holds it, or nobody can tell."""
    with suppress(OSError, struct.error):
        owner, is_free, _ = _look_at(path)
        return None if is_free else owner or "another process"
    return None


def _look_at(path: Path) -> tuple[str, bool, float]:
    """Returns the process that a lock file names, whether no other process holds it, and when it was written."""
    with open(path, "rb", opener=open_at_once) as file:
        owner = file.read(1000).decode(errors="replace").partition("\n")[0]
        answer = fcntl.fcntl(file, fcntl.F_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return owner, FLOCK.unpack(answer)[0] == fcntl.F_UNLCK, os.fstat(file.fileno()).st_mtime


def read_lock(path: Path) -> bytes:
    """Reads a lock file, in which every holder writes other bytes; empty if there is no file. The holder must not call
    this: it would lose its lock when the file is closed."""
    with suppress(OSError), open(path, "rb", opener=open_at_once) as file:
        return file.read(1000)
    return b""


def find_deserter(path: Path) -> str | None:
    """Finds the process that a lock file names, where it ran here and is gone: nobody holds the lock, and there
    is no such process, or it began after the file was written. None where it lives, or nobody can tell."""
    with suppress(OSError, ValueError, struct.error, psutil.Error):
        owner, is_free, written = _look_at(path)
        found = re.fullmatch(r"process (\d+) on (.+)", owner)
        if found and found[2] == socket.gethostname() and is_free and not _lives(found[1], written):
            return owner
    return None


def _lives(process: str, since: float) -> bool:
    """Whether a process of this number runs, and ran at that time already."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(int(process))
        # two seconds, as clocks count in steps
        return bool(found.status() != psutil.STATUS_ZOMBIE and found.create_time() < since + 2.0)
    return False
