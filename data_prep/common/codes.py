"""What a process ends with, and names in the folder of a run: all that is needed to look at one, and quick to load."""

from __future__ import annotations

import signal
from contextlib import suppress
from enum import IntEnum

ENDED = "ended.json"
"""The file of a run's folder that says how the run ended: code, reason, rank and time. A start removes it."""
IN_A_RUN = "tokenizer"
"""The folder of a run that holds its vocabulary."""
CHECKPOINT = "checkpoint.json"
"""The file that a checkpoint of a run has; the run's folder is the second above it."""


class Code(IntEnum):
    """Exit codes of processes. Each says what to do next."""

    DONE = 0
    MISTAKE = 1  # the program is wrong: its traceback says where
    CURE = 2  # something must be mended first: the message says what
    STOPPED = 75  # saved and stopped before the end: start the same command again (EX_TEMPFAIL)
    RANK_LOST = 76  # a rank died or hangs, or storage is gone: start the same command again
    INTERRUPTED = 130  # somebody pressed Ctrl-C: the run has saved, unless twice or before it trained


MEANINGS = {
    Code.DONE: "done",
    Code.MISTAKE: "a fault of the program",
    Code.CURE: "something must be mended first",
    Code.STOPPED: "saved and stopped",
    Code.RANK_LOST: "a rank or storage was lost",
    Code.INTERRUPTED: "Ctrl-C",
}
"""Codes in a few words each."""


def explain_code(code: int) -> str:
    """Returns a code with its meaning; codes above 128 that are not ours are a shell's, for the signal that killed."""
    if code in list(Code):
        return f"{int(code)} ({MEANINGS[Code(code)]})"
    with suppress(ValueError):
        return f"{code} (killed by {signal.Signals(code - 128).name})"
    return str(code)
