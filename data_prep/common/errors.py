"""The errors that a user can do something about; all others are faults of the code."""

from __future__ import annotations

from collections.abc import Iterator

Checks = Iterator[tuple[object, str]]  # whether something holds, and what to tell the user where it does not


class UserError(ValueError):
    """An error that the user can cure: its message says how. Entries print it without a traceback and exit with 2."""


class DamageError(UserError):
    """An error for a file that is not what its record says: its message names the file."""
