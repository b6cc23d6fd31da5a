"""Commands, and the processes that they start, take the packages beside them, wherever else there are others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.copies import write_other_copy
from support.processes import free_port, shell_environment
from support.training import FEW, Place


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of which a user thinks no more, in PYTHONPATH and in the current folder."""
    copy = write_other_copy(tmp_path / "other")
    monkeypatch.setenv("PYTHONPATH", str(copy))
    monkeypatch.chdir(copy)
    return copy


def run(*words: object) -> None:
    """Runs a command to its end, which must be a good one."""
    environment, command = shell_environment(PYTHONPATH=os.environ["PYTHONPATH"]), [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@pytest.mark.slow
def test_workers_run_the_code_of_their_command(other: Path, wiki: Path, tmp_path: Path) -> None:
    words = ["--docs", wiki, "--out", tmp_path / "shards", "--workers", "2", "--vocab-size", "600"]
    run(ROOT / "data_prep" / "shard.py", *words)
    assert (tmp_path / "shards" / "manifest.json").exists()


def test_other_commands_do_too(other: Path) -> None:
    run(ROOT / "cluster/submit.py", "--help")


@pytest.mark.slow
def test_ranks_do_too(other: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)  # torchrun itself is taken from elsewhere
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port())
    run(*torchrun, ROOT / "pretraining" / "train.py", *place.command("run", *FEW))
