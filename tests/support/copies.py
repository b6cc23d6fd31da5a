"""Copies of the packages: one that a stranger adds a file to, with its commands, and one that nobody may import."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes import ROOT, be_program, start

PACKAGES = ("data_prep", "pretraining", "finetuning")


def copy_packages(folder: Path, **files: str) -> Path:
    """Copies the packages, and adds files to the copy: their texts, by paths with `__` for the slashes."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in files.items():
        (folder / f"{path.replace('__', '/')}.py").write_text(text)
    return folder


def be_entry(copy: Path, entry: str, words: Sequence[str]) -> None:
    """What a rank does: an entry of a copy, whose modules replace those that are loaded."""
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    be_program(str(copy / entry), words, copy)


def run_entry(copy: Path, entry: str, *words: object, ranks: int = 1, code: int = 0) -> str:
    """Runs an entry of a copy as a user would, which must end with this code; returns what it prints, of a failure on
    stderr."""
    if entry.startswith("data_prep/"):  # which compiles in a process of its own: LLVM finds no room beside PyTorch
        command, environment = [sys.executable, str(copy / entry), *map(str, words)], {**os.environ, "COLUMNS": "200"}
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stderr if code else ended.stdout
    done = start(ranks, be_entry, copy, entry, [*map(str, words)], environment={"COLUMNS": "200"}).wait(120.0)
    assert [rank.code for rank in done] == [code] * ranks, [rank.output + rank.errors for rank in done]
    return done[0].errors if code else done[0].output


def write_other_copy(folder: Path) -> Path:
    """Writes packages of the same names that fail when anything imports them."""
    for package in ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise RuntimeError('the other copy is imported')\n")
    return folder
