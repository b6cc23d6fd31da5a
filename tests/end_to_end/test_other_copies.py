"""Commands, and the processes that they start, take the packages beside them, wherever else there are others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.copies import write_other_copy
from support.processes import free_port
from support.shards import make_shards
from support.training import RECIPE

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of which a user thinks no more, in PYTHONPATH."""
    copy = write_other_copy(tmp_path / "other")
    monkeypatch.setenv("PYTHONPATH", str(copy))
    monkeypatch.chdir(tmp_path)
    return copy


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, which must be a good one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_workers_run_the_code_of_their_command(
    other: Path, wiki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the copy is in the current folder too."""
    monkeypatch.chdir(other)
    words = ["--docs", wiki, "--out", tmp_path / "shards", "--workers", "2", "--vocab-size", "600"]
    assert run(ROOT / "data_prep" / "shard.py", *words).stderr == ""
    assert (tmp_path / "shards" / "manifest.json").exists()


def test_other_commands_do_too(other: Path) -> None:
    assert run(ROOT / "cluster/submit.py", "--help").stderr == ""


@pytest.mark.slow
def test_ranks_do_too(other: Path, tmp_path: Path) -> None:
    make_shards(tmp_path / "shards")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ["--recipe", tmp_path / "recipe.toml", "--data", tmp_path / "shards", "--out", tmp_path / "run"]
    run(*TORCHRUN, free_port(), ROOT / "pretraining" / "train.py", *words, "--phases.0.steps", "2")
