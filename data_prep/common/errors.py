"""The errors that a user can do something about; all others are faults of the code. Some concern several ranks."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.codes import Code

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal may take for a command, or show in another order, and bytes of names that are no text."""
LOST_WHY = "its own output or its machine's log says why"
Checks = Iterator[tuple[object, str]]  # whether something holds, and what to tell the user where it does not


def printable(text: str) -> str:
    """Replaces control characters by escapes, such as \\x1b for ESC, so that a text cannot command a terminal."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def describe_failure(error: OSError) -> str:
    """Describes why a path cannot be written; names a file that is in the place of one of its folders."""
    if isinstance(error, FileExistsError | NotADirectoryError) and isinstance(error.filename, str | os.PathLike):
        return find_obstacle(Path(error.filename)) or str(error.strerror)
    return error.strerror or str(error)


def find_obstacle(folder: Path) -> str | None:
    """Names the file or broken link in the place of this folder or of one above it; None if there is none."""
    places = (place for place in (folder, *folder.parents) if os.path.lexists(place) and not os.path.isdir(place))
    return next((f"{place} is not a folder; name another" for place in places), None)


def quote(path: object) -> str:
    """Quotes a path or a name for the shell, for commands in messages."""
    return shlex.quote(str(path))


class UserError(ValueError):
    """An error that the user can cure: its message says how. Entries print it without a traceback and exit with 2."""

    code = Code.CURE
    """Exit code of all ranks after this error."""

    def __str__(self) -> str:
        return printable(super().__str__())


def check_all(*checks: Callable[[], Any]) -> list[Any]:
    """Runs all checks and returns their results; raises one UserError that lists the faults of all that fail."""
    found, faults = [], []
    for check in checks:
        try:
            found.append(check())
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))
    return found


class DamageError(UserError):
    """An error for a file that is not what its record says: its message names the file."""


class SharedError(UserError):
    """An error that is raised on every rank at once, so that no rank needs to tell the others."""


class UnreachedError(UserError):
    """An error that rank 0 may be unable to print, because this rank cannot reach it."""


class LostError(UnreachedError):
    """Another rank died, or the connection to it: the same command started again may well succeed."""

    code = Code.RANK_LOST

    def __init__(self, error: object):
        reason = str(error).splitlines()[0]
        super().__init__(f"another rank has ended, or cannot be reached any more: {reason}\n{LOST_WHY}")


def name_ranks(ranks: Sequence[int]) -> str:
    """Names ranks in a message: `rank 3`, or `ranks 1, 2, 3, … (12 of them)`."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f", … ({len(ranks)} of them)" if len(ranks) > 8 else "")
