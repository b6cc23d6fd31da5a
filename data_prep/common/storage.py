"""Waits for shared storage that is gone for a while, such as a file system that its server mounts anew."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from data_prep.common.errors import UserError

Result = TypeVar("Result")
VARIABLE = "CLOZE_STORAGE_SECONDS"
"""The variable with the seconds that storage is waited for; a job sets it once it has seen the files."""
SECONDS, PAUSE = 300.0, 1.0
GONE = {errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENODEV}
"""What file systems say whose server, or disk, is gone."""


def patience(usual: float) -> float:
    """The seconds for which storage is waited for: those of the job, or as many as are usual without one."""
    given = os.environ.get(VARIABLE)
    if given and not re.fullmatch(r"\d{1,6}(\.\d+)?", given, re.ASCII):
        raise UserError(f"{VARIABLE}={given}: give seconds")
    return float(given or usual)


def wait_for_storage(work: Callable[[], Result], there: Path, usual: float = SECONDS) -> Result:
    """Repeats work on files for minutes while their storage is gone; after that its error counts.

    It is gone where a file system says so, or where the path `there`, which was seen before, is not to be seen.
    """
    seconds, begin, told = patience(usual), time.monotonic(), False
    while True:
        try:
            return work()
        except Exception as error:
            missing = not os.path.exists(there)  # Path.exists would raise what storage says that is gone
            if time.monotonic() - begin >= seconds or not (missing or tells_of_gone_storage(error)):
                raise
        if not told:
            told = True
            text = f"warning: {there}: gone, or cannot be reached; waiting up to {seconds:.0f} s for it"
            print(text, file=sys.stderr, flush=True)
        time.sleep(PAUSE)


def tells_of_gone_storage(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, is what file systems say whose server, or disk, is gone."""
    while error is not None:
        within = re.search(r"os error (\d+)", str(error))  # as safetensors says it
        if (error.errno if isinstance(error, OSError) else int(within[1]) if within else None) in GONE:
            return True
        error = error.__cause__
    return False
