"""Tests that measure seconds have the machine for themselves, also where several processes share the tests."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Lets a test run: `alone`, it waits for the tests of other processes, and they wait for it.

    Who waits to be alone holds the turnstile, so that no other test begins meanwhile.
    """
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if name is None:
        yield
        return
    folder = Path(tempfile.gettempdir())
    with (folder / f"{name}-turnstile").open("w") as turnstile, (folder / f"{name}-room").open("w") as room:
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            if not alone:
                fcntl.flock(turnstile, fcntl.LOCK_UN)
            yield
        finally:  # closing does not, where a process that was forked meanwhile goes on
            fcntl.flock(room, fcntl.LOCK_UN)
            fcntl.flock(turnstile, fcntl.LOCK_UN)
