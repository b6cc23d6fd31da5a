"""Storage that is gone for a while is waited for, and a mistake is told at once."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from data_prep.common import storage
from data_prep.common.errors import DamageError, UserError
from data_prep.common.storage import VARIABLE, wait_for_storage


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
    monkeypatch.setattr(storage, "PAUSE", 0.01)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), RuntimeError("I/O error (os error 107)")])
def test_a_file_system_that_says_so_is_waited_for(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(error, times=3)
    assert wait_for_storage(disk.read, tmp_path) == "content"
    assert disk.asked == 4
    assert capsys.readouterr().err.count(f"{tmp_path}: gone, or cannot be reached") == 1


def test_what_is_wrong_while_all_is_there_is_told_at_once(tmp_path: Path) -> None:
    disk = Disk(OSError(errno.ENOENT, "missing"), times=3)
    with pytest.raises(DamageError):
        wait_for_storage(disk.read, tmp_path)
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
    with pytest.raises(UserError, match=f"{VARIABLE}={given}: give seconds"):
        wait_for_storage(tmp_path.stat, tmp_path)


def test_what_nobody_has_seen_before_is_not_waited_for(tmp_path: Path) -> None:
    """As a path that was mistyped: without a job around it, a start waits for nothing."""
    disk = Disk(OSError(errno.ENOENT, "missing"), times=3)
    with pytest.raises(DamageError):
        wait_for_storage(disk.read, tmp_path / "nowhere", usual=0)
    assert disk.asked == 1
