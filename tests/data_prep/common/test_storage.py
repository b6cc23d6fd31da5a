"""Folders that another run has, that may not be entered, and that are gone for a while."""

import errno
import fcntl
import itertools
import os
import re
import signal
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import ROOT
from support.commands import assert_refusal, start

from data_prep.common import files
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import VARIABLE, wait_for_storage
from data_prep.common.hub import find_folder
from data_prep.common.locks import locked
from data_prep.readers.listing import list_files
from data_prep.readers.reader import Problems
from data_prep.vocabulary.source import find_vocabulary_folder


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


MISSING = FileNotFoundError(errno.ENOENT, "missing")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSE", 0.01)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), RuntimeError("I/O error (os error 107)")])
def test_a_lost_file_system_is_awaited(error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = Disk(error, times=3)
    assert (wait_for_storage(disk.read, tmp_path), disk.asked) == ("content", 4)
    assert capsys.readouterr().err.count(f"{tmp_path}: gone, or cannot be reached") == 1


@pytest.mark.parametrize(
    ("place", "seconds", "more", "asks"),
    [(".", "9", {}, 1), ("nowhere", None, {"usual": 0}, 1), ("nowhere", "0.05", {}, 2)],
)
def test_what_was_there_is_awaited_for_some_time(
    place: str, seconds: str | None, more: Any, asks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is there, or a path was mistyped: without a job around it, a start waits for nothing that it has not seen."""
    if seconds is not None:
        monkeypatch.setenv(VARIABLE, seconds)
    clock = itertools.count(0.0, 0.04)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda _: None))
    disk = Disk(MISSING, times=10**9)
    with pytest.raises(DamageError):
        wait_for_storage(disk.read, tmp_path / place, **more)
    assert disk.asked == asks


def test_a_time_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("5m", "nan", "-1"):
        monkeypatch.setenv(VARIABLE, given)
        assert_refusal(f"{VARIABLE}={given}: give seconds", wait_for_storage, tmp_path.stat, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, whom only root can become")
def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    place = tmp_path / "own" / "model"
    place.mkdir(parents=True)
    (tmp_path / "own").chmod(0o700)

    def ask_as_nobody() -> None:
        os.setgid(65534)
        os.setuid(65534)
        finders = partial(find_folder, str(place), ()), partial(find_vocabulary_folder, place)
        for find in (*finders, partial(list_files, [str(place)], None, Problems("fail"))):
            with pytest.raises(UserError) as caught:
                find()
            told = str(caught.value)
            assert (str(place) in told, "permission denied" in told, "no such" in told) == (True, True, False)

    process = get_context("fork").Process(target=ask_as_nobody)
    process.start()
    process.join()
    assert process.exitcode == 0


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
"""Holds a lock, and has forked a child."""


def take(path: Path) -> bool:
    """Takes a lock for a moment; returns whether it protects."""
    with locked(path, "--run x", "{owner} is at work here\nwait for its end") as protected:
        assert path.read_text().startswith(f"process {os.getpid()} on ")
        return protected


def test_a_second_holder_is_refused_until_the_first_is_killed_though_its_child_lives_on(tmp_path: Path) -> None:
    lock = tmp_path / "run" / "lock"
    with pytest.raises(KeyboardInterrupt), locked(lock, "", ""):
        raise KeyboardInterrupt  # the lock ends with the block
    process = start([sys.executable, "-c", HOLD, str(lock), str(ROOT)])
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert_refusal(rf"^--run x: process {process.pid} on \S+ is at work here\nwait for its end$", take, lock)
    process.kill()
    process.wait()
    assert take(lock)
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """With EACCES, another process has the lock, which has not named itself."""
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(number, "")))
    if number == errno.EACCES:
        assert_refusal("--run x: another process is at work here", take, tmp_path / "lock")
    else:
        assert not take(tmp_path / "lock")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").write_text("of somebody")
    (tmp_path / "link").symlink_to("notes")
    obstacle = f"{tmp_path / 'notes'} is not a folder; name another"
    for name, why in (("link", "link is a symbolic link"), ("notes/lock", obstacle), ("notes/run/lock", obstacle)):
        assert_refusal(f"--run x: cannot be written: {re.escape(why)}", take, tmp_path / name)
    assert (tmp_path / "notes").read_text() == "of somebody"
    monkeypatch.setattr(os, "ftruncate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert_refusal("--run x: cannot be written: No space left on device", take, tmp_path / "lock")
