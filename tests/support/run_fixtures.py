"""A finished run, status.py and a pretended queue, for test modules that name this one in `pytest_plugins`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.commands import write_program
from support.run_folders import Look, Squeue

from cluster.status import main


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Look:
    """Calls the command, which must end well, and returns what it prints."""

    def call(*words: object) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A finished run, to be changed."""
    return shutil.copytree(straight, tmp_path / "runs" / "one")


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """Puts a program called squeue on the path; returns the file in which it notes its arguments."""

    def pretend(does: str) -> Path:
        folder = tmp_path / "bin"
        write_program(folder / "squeue", f'echo "$@" >> {folder / "calls"}\n{does}')
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder / "calls"

    return pretend
