"""The errors that a user can do something about; all others are faults of the code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Checks = Iterator[tuple[object, str]]  # whether something holds, and what to tell the user where it does not


class UserError(ValueError):
    """An error that the user can cure: its message says how. Entries print it without a traceback and exit with 2."""


def check_all(*checks: Callable[[], Any]) -> list[Any]:
    """What all checks give; one UserError with the faults of all that find some."""
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
