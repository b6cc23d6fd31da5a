"""A second run is kept out of a folder, as long as the first one is at work there and no longer."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.commands import start

from data_prep.common.errors import UserError
from data_prep.common.locks import locked

REFUSAL = "{owner} is at work here\nwait for its end"
HOLD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from data_prep.common.locks import locked
with locked(Path(sys.argv[1]), "--run x", "taken"):
    if child := os.fork():
        print(child, flush=True)
    time.sleep(60)
"""


def hold(path: Path) -> tuple[subprocess.Popen[str], int]:
    """Starts a process that holds the lock; returns it with the number of a child that it has forked."""
    process = start([sys.executable, "-c", HOLD, str(path), str(ROOT)])
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def kill(process: subprocess.Popen[str], *children: int) -> None:
    for number in (process.pid, *children):
        os.kill(number, signal.SIGKILL)
    process.wait()


def test_a_second_holder_is_refused_with_the_owner_named(tmp_path: Path) -> None:
    process, child = hold(tmp_path / "run" / "lock")
    with pytest.raises(UserError, match=rf"--run x: process {process.pid} on \S+ is at work here\nwait for its end"):
        with locked(tmp_path / "run" / "lock", "--run x", REFUSAL):
            pass
    kill(process, child)


def test_the_lock_ends_with_a_holder_that_is_killed_though_its_child_lives_on(tmp_path: Path) -> None:
    process, child = hold(tmp_path / "lock")
    kill(process)
    with locked(tmp_path / "lock", "--run x", REFUSAL) as protected:
        assert protected
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    os.kill(child, signal.SIGKILL)


def test_the_lock_ends_where_its_block_does(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "lock", "--run x", REFUSAL):
        raise KeyboardInterrupt
    process, child = hold(tmp_path / "lock")
    kill(process, child)


def test_an_owner_that_has_not_named_itself_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", refusing(errno.EACCES))
    with pytest.raises(UserError, match="--run x: somebody is at work here"):
        with locked(tmp_path / "lock", "--run x", REFUSAL, unknown="somebody"):
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "lockf", refusing(number))
    with locked(tmp_path / "lock", "--run x", REFUSAL) as protected:
        assert not protected


def refusing(number: int) -> object:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="--run x: cannot be written: Not a directory"):
        with locked(tmp_path / "file" / "run" / "lock", "--run x", REFUSAL):
            pass


def test_a_lock_that_leads_elsewhere_is_refused_and_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("of somebody")
    (tmp_path / "lock").symlink_to("notes")
    with pytest.raises(UserError, match="--run x: cannot be written: lock is a symbolic link"):
        with locked(tmp_path / "lock", "--run x", REFUSAL):
            pass
    assert (tmp_path / "notes").read_text() == "of somebody"


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "ftruncate", refusing(errno.ENOSPC))
    with pytest.raises(UserError, match="--run x: cannot be written: No space left on device"):
        with locked(tmp_path / "lock", "--run x", REFUSAL):
            pass
