"""Runs under real launchers that are told to stop, from another shell or by Ctrl-C at a terminal."""

import os
import pty
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import wait_for
from support.processes import ROOT, find_program, free_port, shell_environment
from support.training import COMMAND, Place, assert_same, records, train_straight

from data_prep.common.files import read_json
from pretraining.checkpoint.record import list_finished
from pretraining.processes.ending import ENDED
from pretraining.processes.stopping import STOPPING

DEMO = ["--model.hidden", "128", "--phases.0.steps", "9", "--phases.0.batch", "96", "--checkpoints.keep", "9"]
"""a model of the demo's size, without any checkpoint before a stop"""
MPIRUN = f"mpirun --allow-run-as-root --oversubscribe -n 2 {sys.executable}"
TORCHRUN = "torchrun --nproc-per-node 2 --master-port {port}"
DEEPSPEED = "deepspeed --num_gpus 2 --master_port {port}"


class Launched:
    """A launcher and its ranks on a terminal of their own, as a person starts them."""

    def __init__(self, launcher: str, arguments: Sequence[str]):
        words = [*launcher.format(port=free_port()).split(), str(COMMAND), *arguments]
        program = find_program(words[0])
        environment = shell_environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", TERM="xterm")
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            for number in (signal.SIGINT, signal.SIGHUP):  # which tests in the background or under nohup ignore
                signal.signal(number, signal.SIG_DFL)
            os.execve(program, words, environment)
        os.set_blocking(self._terminal, False)
        self.run = Path(arguments[arguments.index("--out") + 1])
        self.seen = ""
        self._code: int | None = None

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def hang_up(self) -> None:
        """Closes the terminal, as a lost connection does."""
        os.close(self._terminal)
        self._terminal = os.open(os.devnull, os.O_RDONLY)

    def goes_on(self) -> bool:
        """Whether the launcher has not ended; takes what it has printed."""
        with suppress(OSError):  # nothing there, or the other side is closed
            while part := os.read(self._terminal, 1 << 16):
                self.seen += part.decode(errors="replace")
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code is None

    def wait(self) -> int:
        """The launcher's exit code, once it has ended and no rank of the run is left."""
        wait_for(lambda: not self.goes_on() and not self.ranks(), 90)
        assert self._code is not None
        return self._code

    def ranks(self) -> list[int]:
        """The processes that name the run's folder, which are the launcher, its ranks and what keeps them."""
        found = psutil.process_iter(["cmdline"])
        return [each.pid for each in found if str(self.run) in " ".join(each.info["cmdline"] or [])]

    def reach(self, step: int) -> None:
        """Waits for a step of the log."""
        metrics = self.run / "metrics.jsonl"
        wait_for(lambda: not self.goes_on() or (metrics.exists() and len(records(self.run)) >= step), 90)
        assert self.goes_on(), self.seen

    def close(self) -> None:
        for pid in self.ranks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.goes_on()
        os.close(self._terminal)


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Any:
    """Starts launchers, and leaves none of their processes."""

    def launch(launcher: str, arguments: Sequence[str]) -> Launched:
        run = Launched(launcher, arguments)
        request.addfinalizer(run.close)
        return run

    return launch


@pytest.fixture(scope="module")
def demo(shared: Place) -> Path:
    """The run of demo's size that nothing happens to."""
    return train_straight(shared, "demo", *DEMO)


def assert_saved(going: Launched, code: int, cause: str) -> str:
    """Asserts that the run has saved its last step and says why it stopped; returns what it says."""
    done, ended = len(records(going.run)), read_json(going.run / ENDED)
    said = f"stopped by {cause} after step {done}, and saved; the same command continues from there"
    assert (ended["code"], ended["reason"]) == (code, said)
    assert list_finished(going.run)[-1].name == f"step-{done:08}"
    return said


@pytest.mark.slow
def test_mpirun_that_is_told_to_end_loses_no_step(launched: Any, place: Place, demo: Path) -> None:
    """It kills its processes half a second later, whether they have saved or not."""
    going = launched(MPIRUN, place.command("run", *DEMO))
    going.reach(1)
    os.kill(going.pid, signal.SIGTERM)
    assert going.wait() != 0
    assert_saved(going, 75, "a signal")
    assert "\x1b" not in going.seen, "plain lines"
    assert "continues after step" in place.train("run", *DEMO)
    assert_same(going.run, demo)


PLAIN = sys.executable
ENDLESS = ["--phases.0.steps", "5000"]


@pytest.mark.slow
def test_mpirun_passes_sigusr1_on_and_the_exit_code_back(launched: Any, place: Place) -> None:
    going = launched(MPIRUN, place.command("run", *ENDLESS))
    going.reach(2)
    os.kill(going.pid, signal.SIGUSR1)
    assert going.wait() == 75
    assert assert_saved(going, 75, "a signal") in going.seen


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PLAIN, TORCHRUN, DEEPSPEED, MPIRUN], ids=lambda text: Path(text.split()[0]).name)
@pytest.mark.parametrize("leaves", ["press_ctrl_c", "hang_up"])
def test_one_ctrl_c_or_a_closed_terminal_saves(launched: Any, place: Place, launcher: str, leaves: str) -> None:
    """Ctrl-C reaches the launcher, and the ranks too where they are in its process group."""
    going = launched(launcher, place.command("run", *ENDLESS))
    going.reach(3)
    getattr(going, leaves)()
    code, pressed = going.wait(), leaves == "press_ctrl_c" and launcher != MPIRUN  # which makes SIGTERM of it
    said = assert_saved(going, *((130, "Ctrl-C") if pressed else (75, "a signal")))
    if launcher != PLAIN:
        assert f"2 ranks on cpu, 1 thread each ({launcher.split()[0]}); data" in going.seen
    if pressed and launcher != DEEPSPEED:  # which is gone before its ranks
        assert code == (130 if launcher == PLAIN else 1)
        assert said in going.seen
        assert going.seen.count(STOPPING.strip()) == 1
