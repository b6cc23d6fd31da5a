"""Commands that a benchmark starts, and ends with all of their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from data_prep.common.errors import UserError
from data_prep.common.supervision import end_with_parent

PATIENCE = 10.0
"""Seconds that processes have to end after a request."""
SAVING = 120.0
"""The same for a run that saves first."""


@contextmanager
def pin_to_one_core() -> Iterator[None]:
    """Pins this process to one core within the context."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Child:
    """A command in a session of its own, which ends with this process. `say` gets its lines, in a thread."""

    def __init__(
        self, command: Sequence[str], say: Callable[[str], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        self._say = say
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._error: Exception | None = None
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # to the end: it would wait for a reader
            try:
                if self._error is None:
                    self._say(line.rstrip("\n"))
            except Exception as error:  # a full disk, a console that is gone
                self._error = error
                self.process.terminate()

    def wait(self, seconds: float) -> int | None:
        """Returns the exit code; None if it still runs after these seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, seconds))
        return None

    def end(self) -> None:
        """Ends it and all that it has started, by a request, then a kill, and passes on the rest of its lines. Raises
        the error of the function that took them."""
        with suppress(ProcessLookupError):  # all have ended
            for number in (signal.SIGTERM, signal.SIGKILL):
                os.killpg(self.process.pid, number)
                deadline = time.monotonic() + PATIENCE
                while time.monotonic() < deadline:
                    self.process.poll()  # until its code is read, it stays in the group
                    os.killpg(self.process.pid, 0)
                    time.sleep(0.05)
        self._reader.join(PATIENCE)
        if self._error is not None:
            raise self._error


def follow(
    command: Sequence[str], log: Path, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> int:
    """Runs a command, and returns its exit code. Its lines are appended to a log, and go to `say`. A Ctrl-C asks the
    command to save and stop, and is raised when it has ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1) as file:

        def note(line: str) -> None:
            begun.wait()  # a Ctrl-C that a line brings about finds the child
            file.write(line + "\n")
            say(line)

        begun = threading.Event()
        child = Child(command, note, environment)
        try:
            begun.set()
            return child.process.wait()
        except KeyboardInterrupt:
            child.process.terminate()
            child.wait(SAVING)
            raise
        finally:
            child.end()


def launch(processes: int, script: str, *words: str) -> None:
    """Runs a script by torchrun, as ranks on this machine. Raises UserError with their message if they fail."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*torchrun, script, *words], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        if not errors:
            print(done.stderr, file=sys.stderr)
        raise UserError(f"a launch of {processes} processes has failed: {errors[0] if errors else 'see above'}")
