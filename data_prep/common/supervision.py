"""Runs a command in a child of the process that a user or a launcher started, which watches over it.

The process that watches loads nothing and computes nothing. So a signal reaches it at once, whatever the child is busy
with: compiled code and one line of 300 MB keep Python's handlers of the child waiting for as long as they take. And a
rank of an MPI job, however busy, tells the others what became of it and hears what became of them (heartbeats.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.heartbeats import PERIOD, SOON, Heartbeats, Verdict, report_to
from data_prep.common.launchers import mpi_rank, mpi_size, name_this_rank, started_by_mpi

GRACE = 2.0
"""Seconds that a child has to end by itself after a signal; a launcher leaves its ranks a quarter of one."""
INTERRUPTED = "\ninterrupted; the same command continues where it stopped"
FOR_EVER = 1e6
OUT_OF_MEMORY = "often because memory ran out"
FEWER = "run the same command again to continue where it stopped (fewer --workers need less memory)"
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a launcher or a shutdown, and a terminal that was closed or lost."""
PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGTSTP, signal.SIGCONT),
)
"""The signals that mpirun sends to ranks, besides SIGKILL."""
PR_SET_PDEATHSIG = 1  # from sys/prctl.h

_interrupted = False
"""Whether this process has heard one of the signals that end it."""


def continue_in_child() -> None:
    """Goes on in a child, and returns in it alone; call it before any thread starts and before what takes long to load.

    The process itself never comes back: it ends with the exit code of the child, or with 130 after one of `ENDING`.
    """
    try:
        ranks, _ = mpi_size(), mpi_rank()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(Code.CURE)
    heard, told = os.pipe()
    awaited = {number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN}
    if child := _fork(awaited, signal.SIGKILL):
        os.close(told)
        try:
            os._exit(_Supervisor(child, awaited, heard).run())
        except BaseException:
            traceback.print_exc()
            os._exit(Code.MISTAKE)
    os.close(heard)
    report_to(told)
    for number in awaited:
        signal.signal(number, signal.SIG_DFL)  # while modules load, it ends the child silently
    if ranks > 1:
        from data_prep.common.ranks import tell_fault

        sys.excepthook = tell_fault


def outlive_mpirun() -> None:
    """Under mpirun, continues in a child that mpirun does not kill; call it before any thread is started.

    A quarter of a second after it has passed SIGTERM on, Open MPI 5 kills the processes that it started, with whatever
    else is in their process groups, and none of its options changes that. A rank that needs time to save therefore
    works in a child with a group of its own. The process itself never comes back: it passes signals on to the child,
    and ends as the child ends. Where it is killed, the child gets SIGTERM, on Linux.
    """
    if not started_by_mpi() or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun gives its ranks more time
        return
    child = _fork(PASSED_ON, signal.SIGTERM)
    if not child:
        os.setpgid(0, 0)
        return
    while (code := _poll(child)) is None:
        if (number := signal.sigwait({*PASSED_ON, signal.SIGCHLD})) != signal.SIGCHLD:
            send_signal(child, number)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), -code)
    os._exit(code)


def _fork(awaited: Iterable[int], at_end: signal.Signals) -> int:
    """Forks a child that gets the signal `at_end` when this process ends, and returns its number; 0 in the child.

    This process has to wait for the `awaited` signals and SIGCHLD (sigwait): they are blocked in it from before the
    child begins, so that none is lost, and none comes between a look and a wait.
    """
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # which some services ignore: the child's end would not be seen
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*awaited, signal.SIGCHLD})
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with_parent(at_end, parent)
    return child


def _poll(child: int) -> int | None:
    """Returns the exit code of a child that has ended, below 0 for the signal that ended it; None while it runs."""
    ended, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def send_signal(process: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def end_with_parent(number: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """Has the system send this process a signal when its parent ends, on Linux, also while compiled code keeps Python
    waiting; where `parent` is gone already, it ends at once."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if parent not in (None, os.getppid()):
        os._exit(128 + number)


def hear_signals() -> None:
    """Turns the first signal of `ENDING` into a KeyboardInterrupt; further ones change nothing.

    What was ignored stays so, as SIGHUP under nohup.
    """

    def interrupt(*_: object) -> None:
        global _interrupted
        _interrupted = True
        for number in heard:
            signal.signal(number, lambda *_: None)
        raise KeyboardInterrupt

    heard = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, interrupt)


def leave(main: Callable[[], int]) -> None:
    """Ends this process with the code of its main function, at once: no thread or worker that is busy is waited for."""
    try:
        code = main()
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        if _interrupted or isinstance(error, KeyboardInterrupt):  # compiled code turns it into errors of its own
            code = tell_interruption()
        else:
            sys.excepthook(*sys.exc_info())
            code = Code.MISTAKE
    if not code:
        sys.exit(code)
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Ends the process with this code, whatever threads, sockets and destructors would still like to do."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe, a closed file
            if stream.isatty() and not started_by_mpi():
                stream.write("\x1b[?25h")  # a live display hides the cursor
            stream.flush()
    os._exit(code)


def tell_interruption() -> int:
    """Tells that a signal has ended the run, and returns its exit code; of several ranks only rank 0 tells.

    Another rank is ended by its launcher also when rank 0 has failed, which was told already.
    """
    if mpi_rank() == 0:
        print(INTERRUPTED, file=sys.stderr)
    return Code.INTERRUPTED


class _Supervisor:
    """Watches over the child of this process."""

    def __init__(self, child: int, awaited: Iterable[int], reports: int) -> None:
        """`reports` is the pipe by which the child of a rank tells where ranks hear of one another."""
        self._child, self._awaited, self._reports = child, {*awaited, signal.SIGCHLD}, reports
        os.set_blocking(reports, False)
        self._stopped_at: float | None = None
        self._beats: Heartbeats | None = None
        self._looks = 0

    def run(self) -> int:
        """Watches over the child until it ends; returns the exit code for this process."""
        while True:
            code = _poll(self._child)
            self._read_report()
            if code is not None:
                return self._end_as_child(code)
            found = signal.sigtimedwait(self._awaited, self._choose_pause())
            if found is not None and found.si_signo != signal.SIGCHLD:
                self._pass_on()
            if self._stopped_at is not None and time.monotonic() - self._stopped_at > (0 if mpi_size() > 1 else GRACE):
                send_signal(self._child, signal.SIGKILL)
            verdict = self._beats.check_others() if self._beats is not None else None
            if verdict is not None:
                return self._follow(verdict)

    def _choose_pause(self) -> float:
        """The seconds to wait for a signal before looking again; for ever where only signals matter."""
        if self._stopped_at is not None:
            return 0.1
        if mpi_size() == 1:
            return FOR_EVER
        self._looks += 1
        return PERIOD / 2 if self._looks > 100 or (self._beats is not None and self._beats.arrived) else SOON

    def _pass_on(self) -> None:
        """Notes a signal that ends this process and passes it on; a second one is passed on too."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        if mpi_size() == 1:
            send_signal(self._child, signal.SIGTERM)  # of this and the terminal's SIGINT the child hears the first

    def _read_report(self) -> None:
        """Begins the heartbeats where the child says."""
        with suppress(BlockingIOError):
            if told := os.read(self._reports, 1 << 16):
                folder, token = json.loads(told)
                self._beats = Heartbeats(Path(folder), token, mpi_rank(), mpi_size())

    def _follow(self, verdict: Verdict) -> int:
        """Ends the child, as another rank has ended or is gone."""
        send_signal(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._say(verdict.text)
        if self._beats is not None and mpi_rank() == 0:
            self._beats.end(verdict.code)
        return verdict.code

    def _end_as_child(self, code: int) -> int:
        """Ends as the child did: says what the child could not say itself, and tells other ranks the exit code."""
        if code < 0 and self._stopped_at is not None:
            code = tell_interruption()
        elif code < 0:
            name, crashed = signal.Signals(-code).name, -code in CRASHES
            code = Code.MISTAKE if crashed else Code.CURE
            how = f"crashed with {name}" if crashed else f"was killed from outside with {name}, {OUT_OF_MEMORY}"
            self._say(f"error: {name_this_rank()}the main process {how}\n{FEWER}")
        is_told = self._beats is not None and self._beats.end(code)
        if self._beats is not None and is_told and mpi_rank() and code and self._stopped_at is None:
            return self._beats.wait() or code
        return code

    @staticmethod
    def _say(text: str) -> None:
        if text:
            with suppress(OSError):
                os.write(2, f"{text}\n".encode())
