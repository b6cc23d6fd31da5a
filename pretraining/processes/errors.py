"""Errors that concern several ranks, and how messages name ranks."""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.common.errors import UserError

LOST_WHY = "its own output or its machine's log says why"


class SharedError(UserError):
    """An error that is raised on every rank at once, so that no rank needs to tell the others."""


class UnreachedError(UserError):
    """An error that rank 0 may be unable to print, because this rank cannot reach it."""


class LostError(UnreachedError):
    """Another rank died, or the connection to it: the same command started again may well succeed."""

    def __init__(self, error: object):
        reason = str(error).splitlines()[0]
        super().__init__(f"another rank has ended, or cannot be reached any more: {reason}\n{LOST_WHY}")


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3, … (12 of them)`."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f", … ({len(ranks)} of them)" if len(ranks) > 8 else "")
