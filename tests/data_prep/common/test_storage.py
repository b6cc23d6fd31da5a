"""Folders that another run has, that may not be entered, and that are gone for a while."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ROOT
from support.commands import assert_refusal, start

from data_prep.common import files
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import VARIABLE, wait_for_storage
from data_prep.common.locks import locked


class Disk:
    """What reads a file as often as it is asked, and fails a few times before."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.asked = error, times, 0

    def read(self) -> str:
        self.asked += 1
        if self.asked > self.times:
            return "content"
        try:
            raise self.error
        except OSError as error:
            raise DamageError("cannot be read") from error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSE", 0.01)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), RuntimeError("I/O error (os error 107)")])
def test_a_lost_file_system_is_awaited(error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = Disk(error, times=3)
    assert (wait_for_storage(disk.read, tmp_path), disk.asked) == ("content", 4)
    assert capsys.readouterr().err.count(f"{tmp_path}: gone, or cannot be reached") == 1


@pytest.mark.parametrize("more", [{}, {"usual": 0}], ids=["all is there", "a path was mistyped"])
def test_what_is_wrong_while_all_is_there_or_never_was_is_told_at_once(tmp_path: Path, more: dict[str, int]) -> None:
    """Without a job around it, a start waits for nothing that nobody has seen before."""
    disk = Disk(OSError(errno.ENOENT, "missing"), times=3)
    with pytest.raises(DamageError):
        wait_for_storage(disk.read, tmp_path / "nowhere" if more else tmp_path, **more)
    assert disk.asked == 1


def test_after_some_time_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0.1")
    disk = Disk(OSError(errno.ENOENT, "missing"), times=10**9)
    with pytest.raises(DamageError):
        wait_for_storage(disk.read, tmp_path / "nowhere")
    assert disk.asked > 1


@pytest.mark.parametrize("given", ["5m", "nan", "-1"])
def test_a_time_that_is_none_is_named(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    assert_refusal(f"{VARIABLE}={given}: give seconds", wait_for_storage, tmp_path.stat, tmp_path)


NOBODY = 65534
ASK = """
import os, sys
from pathlib import Path
from data_prep.common.errors import UserError
from data_prep.common.hub import find_folder
from data_prep.readers.listing import list_files
from data_prep.readers.reader import Problems
from data_prep.vocabulary.source import find_vocabulary_folder
os.setgid({id}); os.setuid({id})
place = sys.argv[1]
asked = (lambda: find_folder(place, ()), lambda: find_vocabulary_folder(Path(place)),
         lambda: list_files([place], None, Problems("fail")))
for ask in asked:
    try:
        ask()
    except UserError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, whom only root can become")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    place = tmp_path / "own" / "model"
    place.mkdir(parents=True)
    (tmp_path / "own").chmod(0o700)
    command = [sys.executable, "-c", ASK.format(id=NOBODY), str(place)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 3
    for line in said:
        assert str(place) in line
        assert "permission denied" in line
        assert "no such" not in line


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


def refused(path: Path) -> str:
    """Asks for a lock that it does not get; returns what is said."""
    with pytest.raises(UserError) as caught, locked(path, "--run x", REFUSAL):
        pass
    return str(caught.value)


def kill(process: subprocess.Popen[str], *children: int) -> None:
    for number in (process.pid, *children):
        os.kill(number, signal.SIGKILL)
    process.wait()


def test_a_second_holder_is_refused_until_the_first_is_killed_though_its_child_lives_on(tmp_path: Path) -> None:
    lock = tmp_path / "run" / "lock"
    process, child = hold(lock)
    said = rf"--run x: process {process.pid} on \S+ is at work here\nwait for its end"
    assert re.fullmatch(said, refused(lock))
    kill(process)
    with locked(lock, "--run x", REFUSAL) as protected:
        assert protected
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
    os.kill(child, signal.SIGKILL)


def test_the_lock_ends_where_its_block_does(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "lock", "--run x", REFUSAL):
        raise KeyboardInterrupt
    process, child = hold(tmp_path / "lock")
    kill(process, child)


def test_an_owner_that_has_not_named_itself_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "lockf", refusing(errno.EACCES))
    assert "--run x: another process is at work here" in refused(tmp_path / "lock")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "lockf", refusing(number))
    with locked(tmp_path / "lock", "--run x", REFUSAL) as protected:
        assert not protected


def refusing(number: int) -> object:
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").write_text("of somebody")
    (tmp_path / "link").symlink_to("notes")
    assert "--run x: cannot be written: link is a symbolic link" in refused(tmp_path / "link")
    obstacle = f"{tmp_path / 'notes'} is not a folder; name another"
    for name in ("notes", "notes/run"):
        assert f"--run x: cannot be written: {obstacle}" in refused(tmp_path / name / "lock")
    assert (tmp_path / "notes").read_text() == "of somebody"
    monkeypatch.setattr(os, "ftruncate", refusing(errno.ENOSPC))
    assert "--run x: cannot be written: No space left on device" in refused(tmp_path / "lock")
