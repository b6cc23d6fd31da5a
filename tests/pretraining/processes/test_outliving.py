"""The child in which a rank of mpirun works: it hears the signals, ends as it would have, and is not killed with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ROOT, wait_for

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from data_prep.common.supervision import outlive_mpirun

folder, act = Path(sys.argv[1]), sys.argv[2]
parent = os.getpid()
outlive_mpirun()
(folder / "child").write_text(f"{os.getpid()} {parent}")
if act == "end":
    os._exit(75)
if act == "die":
    os.kill(os.getpid(), signal.SIGKILL)

def hear(number, _):
    (folder / "hearing").write_text(signal.Signals(number).name)
    (folder / "hearing").rename(folder / "heard")  # so that nobody sees it empty
    os._exit(3)

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, hear)
(folder / "ready").touch()
time.sleep(60)
"""


def start(folder: Path, act: str, **environment: str) -> subprocess.Popen[bytes]:
    kept = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), act], env=kept, start_new_session=True)


def child_and_parent(folder: Path) -> tuple[int, int]:
    child, parent = map(int, (folder / "child").read_text().split())
    return child, parent


@pytest.mark.parametrize(("act", "code"), [("end", 75), ("die", -signal.SIGKILL)])
def test_the_exit_code_is_passed_on(tmp_path: Path, act: str, code: int) -> None:
    assert start(tmp_path, act, OMPI_COMM_WORLD_SIZE="1").wait(30) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "wait", OMPI_COMM_WORLD_SIZE="1")
    wait_for((tmp_path / "ready").exists)
    process.send_signal(number)
    assert process.wait(30) == 3
    assert (tmp_path / "heard").read_text() == number.name


def test_the_kill_of_a_process_group_is_outlived(tmp_path: Path) -> None:
    """As mpirun kills; the child hears of it by SIGTERM."""
    process = start(tmp_path, "wait", OMPI_COMM_WORLD_SIZE="1")
    wait_for((tmp_path / "ready").exists)
    child, parent = child_and_parent(tmp_path)
    assert child != parent == process.pid
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    wait_for((tmp_path / "heard").exists)
    assert (tmp_path / "heard").read_text() == "SIGTERM"


def test_without_mpirun_there_is_no_child(tmp_path: Path) -> None:
    """Nor under torchrun that mpirun has started; a RANK that somebody has set by hand says nothing of that."""
    for variables, alone in (({"TORCHELASTIC_RUN_ID": "none"}, True), ({}, False)):
        assert start(tmp_path, "end", RANK="0", OMPI_COMM_WORLD_SIZE="2", **variables).wait(30) == 75
        child, parent = child_and_parent(tmp_path)
        assert (child == parent) == alone
