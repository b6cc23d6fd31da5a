"""Lets the ranks of mpirun outlive it, which gives them no time to save.

A quarter of a second after it has passed SIGTERM on, Open MPI 5 kills the processes that it started, with whatever else
is in their process groups, and none of its options changes that. A rank therefore works in a child with a group of its
own, which saves and ends although mpirun is gone; the process that mpirun knows only waits for it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from data_prep.common.supervision import end_with_parent
from data_prep.common.terminal import started_by_mpi
from pretraining.processes.environment import prepare_process

PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGTSTP, signal.SIGCONT),
)
"""what mpirun sends to ranks, besides SIGKILL"""


def begin_rank(small_steps: bool = False) -> None:
    """Prepares a rank, which outlives mpirun; call it before PyTorch is loaded, which starts threads."""
    prepare_process(small_steps)
    outlive_mpirun()


def outlive_mpirun() -> None:
    """Under mpirun, goes on in a child that mpirun does not kill; call it before any thread is started.

    The process itself never comes back: it passes signals on to the child, and ends as the child ends. Where it is
    killed, the child hears SIGTERM, on Linux.
    """
    if not started_by_mpi() or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun gives its ranks more time
        return
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        end_with_parent(parent=parent)
        return
    for number in PASSED_ON:
        signal.signal(number, lambda heard, _: _pass_on(heard, child))
    _end_like(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _pass_on(number: int, child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _end_like(code: int) -> None:
    """Ends this process with the exit code of another, or by the signal that ended it."""
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
