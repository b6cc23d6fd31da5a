"""Copies of the packages: one that a stranger adds a file to, with its commands, and one that nobody may import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.processes import ROOT, free_port

PACKAGES = ("data_prep", "pretraining")


def copy_packages(folder: Path, **files: str) -> Path:
    """Copies the packages, and adds files to the copy: their texts, by paths with `__` for the slashes."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in files.items():
        (folder / f"{path.replace('__', '/')}.py").write_text(text)
    return folder


def write_other_copy(folder: Path) -> Path:
    """Writes packages of the same names that fail when anything imports them."""
    for package in ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise RuntimeError('the other copy is imported')\n")
    return folder


def run_entry(copy: Path, entry: str, *words: object, ranks: int = 1) -> str:
    """Runs an entry of a copy as a user would, which must do well; returns what it prints."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(copy / entry), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
