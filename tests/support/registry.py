"""Tests that install from a registry of Python packages: whether there is one, and projects to install into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT

CODE = ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster")


def locked(name: str) -> str:
    """The line of requirements.lock for a package that has one version for all Pythons."""
    return next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith(f"{name}=="))


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for some gigabytes, which are gone afterwards; skips where pip reaches no torch for CPUs."""
    with tempfile.TemporaryDirectory(prefix="cloze-") as folder:
        wanted = [f"{locked('torch')}+cpu", locked("idna")]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--no-deps"]
        done = subprocess.run(
            [*pip, "--quiet", "--ignore-installed", *wanted], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"pip reaches no registry with a torch for CPUs: {done.stderr.strip().splitlines()[-1]}")
        yield Path(folder)


def copy_project(folder: Path) -> Path:
    """The project as a user has it, without what was installed in its folder."""
    folder.mkdir()
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "requirements.lock", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def without_pythons_paths() -> dict[str, str]:
    """This environment, in which Python finds only what is installed."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
