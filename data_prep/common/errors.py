"""What can go wrong for a user, as opposed to what is wrong in the code."""

from __future__ import annotations


class UserError(ValueError):
    """The user can cure this: the message says how. Entries print it without a traceback and exit with 2."""


class DamageError(UserError):
    """A file of ours is not what its record says: the message names it."""
