"""Runs a command in a child of the process that a user or a launcher started, which watches over it.

The process that watches loads nothing and computes nothing. So a signal reaches it at once, whatever the child is busy
with: compiled code and one line of 300 MB keep Python's handlers of the child waiting for as long as they take. And a
rank of an MPI job, however busy, tells the others what became of it and hears what became of them (heartbeats.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.heartbeats import GONE, Heartbeats, Verdict, report_to
from data_prep.common.launchers import mpi_rank, mpi_size, started_by_mpi

GRACE = 2.0
"""Seconds that a child has to end by itself after a signal; a launcher leaves its ranks a quarter of one."""
INTERRUPTED = "\ninterrupted; the same command continues where it stopped"
LAST = 1.0
"""Seconds that other ranks end after rank 0, since mpirun ends all as soon as the first of them fails."""
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
    parent, (heard, told) = os.getpid(), os.pipe()
    watch = _Watch(heard)
    child = os.fork()
    if child:
        os.close(told)
        try:
            os._exit(watch.over(child))
        except BaseException:
            traceback.print_exc()
            os._exit(Code.MISTAKE)
    watch.forget()
    end_with_parent(signal.SIGKILL, parent)
    report_to(told)
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
    parent, awaited = os.getpid(), {*PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is ignored is not waited for
    child = os.fork()
    if not child:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.setpgid(0, 0)
        end_with_parent(parent=parent)
        return
    ended = status = 0
    while not ended:  # no signal can come between a look and a wait
        if (number := signal.sigwait(awaited)) == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
        else:
            send_signal(child, number)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.kill(os.getpid(), -code)
    os._exit(code)


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


class _Watch:
    """The watch of a process over its child."""

    def __init__(self, reports: int) -> None:
        """Notes signals from now on, so that none is lost while the child is made."""
        self._reports, self._heard = reports, b""
        self._wake, self._awake = os.pipe()
        for end in (self._wake, self._awake):
            os.set_blocking(end, False)
        self._stopped_at: float | None = None
        self._beats: Heartbeats | None = None
        self._child, self._fault = 0, ""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # which some services ignore: the child's end would not be seen
        self._before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGCHLD)}
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._note)
        self._woken = signal.set_wakeup_fd(self._awake, warn_on_full_buffer=False)

    def forget(self) -> None:
        """In the child: restores signal handlers and closes the pipes; a signal while modules load ends it silently."""
        signal.set_wakeup_fd(self._woken)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler == signal.SIG_IGN else signal.SIG_DFL)
        for end in (self._reports, self._wake, self._awake):
            os.close(end)

    def over(self, child: int) -> int:
        """Watches over the child until it ends; returns the exit code for this process."""
        self._child = child
        if self._stopped_at is not None:
            send_signal(self._child, signal.SIGTERM)
        while True:
            waiting = [self._wake, *([self._reports] if self._reports >= 0 else [])]
            ready, _, _ = select.select(waiting, [], [], self._patience())
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if self._reports in ready:
                self._hear()
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return self._conclude(os.waitstatus_to_exitcode(status))
            if self._stopped_at is not None and time.monotonic() - self._stopped_at > (0 if mpi_size() > 1 else GRACE):
                send_signal(self._child, signal.SIGKILL)
            verdict = self._beats.look() if self._beats is not None else None
            if verdict is not None:
                return self._follow(verdict)

    def _patience(self) -> float | None:
        """The seconds to wait for news before looking again; None where only news matters."""
        if self._stopped_at is not None:
            return 0.1
        return self._beats.pause if self._beats is not None else None

    def _note(self, number: int, _: object) -> None:
        """Notes a signal and passes it on; a second one is passed on too."""
        if number == signal.SIGCHLD:
            return
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        if self._child and mpi_size() == 1:
            send_signal(self._child, signal.SIGTERM)  # of this and the terminal's SIGINT the child hears the first

    def _hear(self) -> None:
        """Reads the messages of the child, a line of JSON each."""
        told = os.read(self._reports, 1 << 16)
        if not told:
            self._reports = -1
        *lines, self._heard = (self._heard + told).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "folder" in message:
                self._beats = Heartbeats(Path(message["folder"]), message["token"], mpi_rank(), message["hosts"])
                self._beats.begin()
            self._fault = message.get("fault", "")

    def _follow(self, verdict: Verdict) -> int:
        """Ends the child, as another rank has ended or is gone."""
        send_signal(self._child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._child, 0)
        self._say(verdict.text)
        if self._beats is not None and mpi_rank() == 0:
            self._beats.end(verdict.code, "")
        return verdict.code

    def _conclude(self, code: int) -> int:
        """Ends as the child did: says what the child could not say itself, and tells other ranks."""
        if self._reports >= 0:
            self._hear()
        text = ""
        if code < 0 and self._stopped_at is not None:
            code, text = Code.INTERRUPTED, INTERRUPTED if mpi_rank() == 0 else ""
        elif code < 0:
            name, crashed = signal.Signals(-code).name, -code in CRASHES
            code = Code.MISTAKE if crashed else Code.CURE
            how = f"crashed with {name}" if crashed else f"was killed from outside with {name}, {OUT_OF_MEMORY}"
            text = f"{GONE}its process {how}" if mpi_rank() else f"error: the main process {how}\n{FEWER}"
        elif mpi_rank():
            text = self._fault
        if self._beats is not None and self._beats.end(code, text) and mpi_rank() and code and self._stopped_at is None:
            verdict = self._beats.wait()
            return verdict.code if verdict is not None else code
        self._say(text if mpi_rank() == 0 or not text else f"rank {mpi_rank()} on {socket.gethostname()}: {text}")
        if code and mpi_rank() and self._stopped_at is None:
            time.sleep(LAST)
        return code

    @staticmethod
    def _say(text: str) -> None:
        if text:
            with suppress(OSError):
                os.write(2, f"{text}\n".encode())
