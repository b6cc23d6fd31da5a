"""Ranks on this machine, for tests: `spawn(2, function)` waits for them, `start(2, function)` lets them go on."""

import fcntl
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.commands import wait_for as wait_for
from support.rank_server import ROOT as ROOT
from support.rank_server import Order, ask_server

from data_prep.common.launchers import World, find_world
from data_prep.common.supervision import exit_now

LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_")
"""how the names of launchers' variables begin"""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""what torchrun tells a rank"""


@dataclass(frozen=True)
class Done:
    """What became of one rank."""

    code: int | None
    """None while it goes on"""
    output: str
    errors: str
    result: Any = None
    """what the function returned"""

    @property
    def ending(self) -> str:
        """How it ended, with the name of a signal that killed it, and the last that it said."""
        code = self.code
        return f"{signal.Signals(-code).name if code and code < 0 else f'code {code}'}: {self.errors[-3000:]}"


class Run:
    """Ranks that work together, as they go on."""

    def __init__(self, folder: Path, pids: list[int]):
        """Rank n has its files in the folder's folder n."""
        self.folder, self.pids = folder, pids
        self._codes: dict[int, int] = {}

    @property
    def step(self) -> int:
        """The last step that rank 0 has told of; 0 before."""
        told = re.findall(r"^ *(\d+)/\d+  loss", (self.folder / "0" / "output").read_text(), re.MULTILINE)
        return int(told[-1]) if told else 0

    def reach(self, step: int) -> None:
        """Waits for a step."""
        wait_for(lambda: self.step >= step or not self.goes_on())
        assert self.goes_on(), f"it ended before step {step}: {self.done()}"

    def goes_on(self, *ranks: int) -> bool:
        """Whether any of these ranks has not ended, by default any of all."""
        if going := [pid for pid in self.pids if pid not in self._codes]:
            self._codes |= ask_server(going)
        return any(self.pids[rank] not in self._codes for rank in ranks or range(len(self.pids)))

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal to these ranks, by default to all."""
        for rank in ranks or range(len(self.pids)):
            if self.goes_on(rank):
                os.kill(self.pids[rank], number)

    def wait(self, seconds: float = 90.0, *ranks: int) -> list[Done]:
        """Waits for the end of these ranks, by default of all, and kills them all where it does not come."""
        deadline = time.monotonic() + seconds
        while self.goes_on(*ranks):
            if time.monotonic() > deadline:
                self.end()
                raise TimeoutError(f"ranks did not end within {seconds:.0f} s: {self.done()}")
            time.sleep(0.01)
        return self.done()

    def done(self) -> list[Done]:
        """What has become of the ranks so far."""
        found = []
        for rank, pid in enumerate(self.pids):
            folder = self.folder / str(rank)
            output, errors = ((folder / name).read_text(errors="replace") for name in ("output", "errors"))
            result = folder / "result"
            value = pickle.loads(result.read_bytes()) if pid in self._codes and result.exists() else None
            found.append(Done(self._codes.get(pid), output, errors, value))
        return found

    def end(self) -> None:
        """Kills what has not ended, with all that it started."""
        while self.goes_on():
            for pid in self.pids:
                if pid not in self._codes:
                    with suppress(ProcessLookupError):  # it may have no group of its own yet
                        os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)


RUNS: list[Run] = []
"""what a test has started; when it is over, all of them are ended"""


def start(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    come: int | None = None,
    launched: bool = True,
) -> Run:
    """Starts a function as ranks on loopback, as torchrun would but without its watching over them.

    The function stands at the top of a module. No rank is ended when another fails: that is for what is tested. Only
    the first `come` ranks are started, where not all are to come. Without `launched`, nothing tells a rank of others.
    """
    folder, port = Path(tempfile.mkdtemp(prefix="ranks-")), port or free_port()
    call, pids = pickle.dumps((function, arguments)), []
    for rank in range(ranks if come is None else come):
        (folder / str(rank)).mkdir()
        for name in ("output", "errors"):
            (folder / str(rank) / name).touch()
        variables = {**rank_environment(rank, ranks, port), **(environment or {})}
        for name in () if launched else LAUNCHED:
            del variables[name]
        pids.append(ask_server(Order(call, variables, sys.path, folder / str(rank))))
    RUNS.append(Run(folder, pids))
    return RUNS[-1]


def end_runs() -> None:
    """Leaves nothing behind of what was started."""
    while RUNS:
        run = RUNS.pop()
        run.end()
        shutil.rmtree(run.folder)


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets, and one thread of arithmetic."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    told = zip(LAUNCHED, map(str, (rank, ranks, rank, ranks, "127.0.0.1", port)), strict=True)
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CLOZE_SECRET": "of these ranks"}
    own["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    return {**inherited, **dict(told), **own}


def spawn(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 90.0,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> list[Done]:
    """Starts a function as ranks, and waits for all of them; after `timeout` seconds, all are killed."""
    return start(ranks, function, *arguments, environment=environment, port=port).wait(timeout)


def shell_environment(**more: str) -> dict[str, str]:
    """Variables of a person's shell, without those of a launcher, and with one thread of arithmetic for each rank."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ours = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "PATH": path}
    return {**inherited, **ours, **more}


def find_program(name: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    program = shutil.which(name, path=shell_environment()["PATH"])
    if program is None:
        pytest.skip(f"no {name} here")
    return program


def run_launcher(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float = 90.0
) -> subprocess.CompletedProcess[str]:
    """Runs a command that starts fresh processes, in a folder; skips the test where its program is not installed."""
    return subprocess.run(
        [find_program(command[0]), *command[1:]],
        env=shell_environment(**environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def be_program(entry: str, words: Sequence[str], folder: Path) -> None:
    """What a rank does: a script as `python ENTRY WORDS`, typed in a folder, without the seconds of its imports."""
    os.chdir(folder)
    sys.argv = [entry, *words]
    runpy.run_path(entry, run_name="__main__")


def run_program(entry: str, words: Sequence[str], folder: Path, seconds: float = 90.0, **environment: str) -> Done:
    """Runs a script in a process that no launcher has started."""
    alone = start(1, be_program, entry, list(words), folder, environment=environment, launched=False)
    return alone.wait(seconds)[0]


def take_part(
    work: Callable[[World], object], patience: float = 300.0, run: Path | None = None, folder: Path | None = None
) -> object:
    """One rank's life, as an entry leads it: it meets the others, works, and ends as its work ends."""
    from pretraining.processes.ending import Ending  # which loads PyTorch
    from pretraining.processes.group import choose_device, connect, disconnect

    with Ending() as ending:
        ending.world = world = find_world(os.environ)
        connect(world, choose_device("cpu", world), timeout=61, patience=patience, folder=folder)
        if run is not None:
            ending.record_in(run)
        found = work(world)
        disconnect()
    if ending.code:
        exit_now(ending.code)
    return found


def expect_end(done: Sequence[Done], code: int, message: str) -> None:
    """All end with the code, and the message is on rank 0 alone, once and without a traceback."""
    assert [rank.code for rank in done] == [code] * len(done), done
    assert done[0].errors.count(message) == 1, done
    assert "Traceback" not in done[0].errors
    assert [rank.output + rank.errors for rank in done[1:]] == [""] * (len(done) - 1)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def made_once(own: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name, beside the process's `own`; the process that asks first makes it, the others wait."""
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, made = root / name, root / f"{name} is made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
                make(folder)
                made.touch()
        finally:  # closing does not, where a process that was forked meanwhile goes on
            fcntl.flock(lock, fcntl.LOCK_UN)
    return folder
