"""What ranks do around their work in tests of how they meet, fail and end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from support.processes import Done

from data_prep.common.launchers import World, find_world
from data_prep.common.supervision import exit_now
from pretraining.processes.ending import Code, Ending
from pretraining.processes.group import choose_device, connect, disconnect


def take_part(work: Callable[[World], None], patience: float = 300.0, run: Path | None = None) -> None:
    """One rank's life, as an entry leads it: it meets the others, works, and ends as its work ends."""
    with Ending() as ending:
        ending.world = world = find_world(os.environ)
        connect(world, choose_device("cpu", world), timeout=60, patience=patience)
        if run is not None:
            ending.record_in(run)
        work(world)
        disconnect()
    if ending.code:
        exit_now(ending.code)


def expect_end(done: Sequence[Done], code: Code, message: str) -> None:
    """All end with the code, and the message is on rank 0 alone, once and without a traceback."""
    assert [rank.code for rank in done] == [code] * len(done), done
    assert done[0].errors.count(message) == 1, done
    assert "Traceback" not in done[0].errors
    assert [rank.output + rank.errors for rank in done[1:]] == [""] * (len(done) - 1)
