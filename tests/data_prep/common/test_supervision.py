"""A command ends when its user wants it to, whatever it is busy with, and leaves no process behind.

A rank of mpirun works in a child, which hears the signals, ends as the rank would have, and is not killed with it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT
from support.commands import has_ended, start, wait_for

from data_prep.common.supervision import tell_interruption

PROGRAM = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from data_prep.common.supervision import continue_in_child, hear_signals, leave
continue_in_child()

def main():
    hear_signals()
    try:
        BODY
    except KeyboardInterrupt:
        print("polite", flush=True)
        return 130
    return 0

leave(main)
"""
READY = "print(os.getpid(), flush=True); "
REST = "[time.sleep(0.01) for _ in range(10_000)]"  # a signal just before a sleep is handled only after it
DEAF = "sum(range(10**12))"  # holds Python's lock, and its handlers back, for hours


def begin(body: str, *words: str) -> tuple[subprocess.Popen[str], int]:
    """Starts a command, maybe by words before it; returns it with the number of its child that does the work."""
    program = PROGRAM.replace("BODY", body if READY in body else READY + body)
    process = start([sys.executable, *words, "-c", program], stdin=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.timed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_python_cannot_interrupt_ends_within_three_seconds(number: signal.Signals) -> None:
    process, worker = begin(DEAF)
    time.sleep(0.2)
    sent = time.monotonic()
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert time.monotonic() - sent < 3
    assert process.returncode == 130
    assert "interrupted; the same command continues where it stopped" in errors
    assert "polite" not in output
    assert has_ended(worker)


FAULT = f"""try:
            {READY}{REST}
        except KeyboardInterrupt:
            raise SystemError("returned a result with an exception set")"""
"""As compiled code may make it of an interruption."""
TOLD = "\ninterrupted; the same command continues where it stopped\n"


@pytest.mark.parametrize(("body", "polite", "said"), [(REST, True, ""), (FAULT, False, TOLD)])
def test_what_can_be_interrupted_ends_with_130(body: str, polite: bool, said: str) -> None:
    process, _ = begin(body)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, "polite" in output, errors) == (130, polite, said)


def test_a_key_press_that_reaches_all_processes_several_times_is_answered_once() -> None:
    process, worker = begin(REST)
    for number in 3 * (signal.SIGINT, signal.SIGTERM):
        for member in (worker, process.pid):
            with suppress(ProcessLookupError):  # it may have ended by the press before
                os.kill(member, number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output.count("polite") <= 1
    assert not any(word in errors for word in ("Traceback", "ignored"))


def test_a_process_that_ignores_signals_as_under_nohup_goes_on_and_ends() -> None:
    ignore = "\n".join(f"signal.signal(signal.{name}, signal.SIG_IGN)" for name in ("SIGINT", "SIGHUP", "SIGCHLD"))
    code = f"import os, signal, sys\n{ignore}\nos.execv(sys.executable, sys.argv[1:])"
    process, _ = begin(f"{READY}print(input())", "-c", code, sys.executable)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    assert (process.communicate("done\n", timeout=30)[0], process.returncode) == ("done\n", 0)


def test_a_main_process_killed_from_outside_is_told() -> None:
    process, worker = begin(DEAF)
    os.kill(worker, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert (
        "error: the main process was killed from outside with SIGKILL, often because memory ran out\nrun the" in errors
    )


def test_no_child_outlives_a_process_that_was_killed_while_it_watched() -> None:
    process, worker = begin(DEAF)
    process.kill()
    process.communicate()
    wait_for(lambda: has_ended(worker))


BUSY_THREAD = "import threading; threading.Thread(target=time.sleep, args=[100]).start(); return 2"
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        *(("return 3", 3, ""), ("sys.exit(4)", 4, ""), ("sys.exit('why')", 1, "why\n"), ("sys.exit()", 0, "")),
        *(("raise ValueError('a bug')", 1, "ValueError: a bug"), (BUSY_THREAD, 2, "")),
        (CRASH, 1, "the main process crashed with SIGSEGV"),
    ],
)
def test_a_command_ends_with_the_code_of_its_main_function(body: str, code: int, said: str) -> None:
    process, _ = begin(body)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert said in errors
    assert bool(errors) == bool(said)


@pytest.mark.parametrize(("rank", "told"), [("0", 1), ("1", 0)])
def test_of_several_ranks_only_the_first_tells_that_it_was_interrupted(
    rank: str, told: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher also ends the ranks that are left when one fails: nobody interrupted that run."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert tell_interruption() == 130
    assert capsys.readouterr().err.count("interrupted") == told


# Ranks of mpirun

RANK = """
import os, signal, sys, time
from data_prep.common.supervision import outlive_mpirun

heard, parent = sys.argv[1], os.getpid()
outlive_mpirun()

def hear(number, _):
    with open(heard + ".new", "w") as file:
        file.write(signal.Signals(number).name)
    os.rename(heard + ".new", heard)  # so that nobody sees it empty
    os._exit(3)

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, hear)
print(os.getpid(), parent, flush=True)
exec(sys.argv[2])
"""


def begin_rank(heard: Path, act: str = REST, **variables: str) -> tuple[subprocess.Popen[str], int, int]:
    """Starts a rank of mpirun; returns it with the numbers of the process that works and of the one that waits."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMPI_COMM_WORLD_SIZE": "1", **variables}
    command = [sys.executable, "-c", RANK, str(heard), act]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    child, parent = map(int, process.stdout.readline().split())
    process.stdout.close()
    return process, child, parent


@pytest.mark.parametrize(("act", "code"), [("os._exit(75)", 75), ("os.kill(os.getpid(), signal.SIGKILL)", -9)])
def test_the_exit_code_of_a_rank_is_passed_on(tmp_path: Path, act: str, code: int) -> None:
    assert begin_rank(tmp_path / "heard", act)[0].wait(30) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_passed_on_to_a_rank(tmp_path: Path, number: signal.Signals) -> None:
    process, _, _ = begin_rank(tmp_path / "heard")
    process.send_signal(number)
    assert process.wait(30) == 3
    assert (tmp_path / "heard").read_text() == number.name


def test_a_rank_outlives_the_kill_of_its_process_group(tmp_path: Path) -> None:
    """As mpirun kills; the child hears of it by SIGTERM."""
    process, child, parent = begin_rank(tmp_path / "heard")
    assert child != parent == process.pid
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    wait_for((tmp_path / "heard").exists)
    assert (tmp_path / "heard").read_text() == "SIGTERM"


@pytest.mark.parametrize(("variables", "alone"), [({"TORCHELASTIC_RUN_ID": "none"}, True), ({"RANK": "0"}, False)])
def test_without_mpirun_there_is_no_child(tmp_path: Path, variables: dict[str, str], alone: bool) -> None:
    """Nor under torchrun that mpirun has started; a RANK that somebody has set by hand says nothing of that."""
    process, child, parent = begin_rank(tmp_path / "heard", "os._exit(0)", **variables)
    assert (child == parent) == alone
    assert process.wait(30) == 0
