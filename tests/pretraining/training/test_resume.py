"""A run folder and its lock."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pretraining.training.resume import alone_in


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with alone_in(tmp_path / "run"):
        assert (tmp_path / "run" / "lock").exists()
