#!/usr/bin/env python3
"""Checks that all that `make gpu` needs is installed and that there is a GPU, and says what was found."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

from benchmarks.gpu.install import NEEDED, ROOT
from benchmarks.measure import environment, mistakes_told, write_results
from data_prep.common.errors import UserError

MODULES = {"pytest-timeout": "pytest_timeout"}
"""of packages whose modules are called otherwise"""


@dataclass(frozen=True)
class Machine:
    """Says what is installed, and on what machine."""

    out: Path
    """File for what is found."""
    dry: bool = False
    """A machine without a GPU will do."""


def describe(dry: bool) -> dict[str, Any]:
    """What decides the numbers besides the code; UserError where something is missing."""
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(MODULES.get(name, name))
        except ImportError as error:
            missing.append(f"{name}: {error}")
    if missing:
        raise UserError("\n".join([*missing, "make gpu installs them: rm -r build/gpu-venv, and start it again"]))
    found = {**environment(["torch", *NEEDED]), "cuda": torch.version.cuda, "commit": find_commit(), "dry": dry}
    if not dry and "gpu" not in found:
        raise UserError(f"torch {torch.__version__} finds no GPU: check nvidia-smi, or take make gpu DRY=1")
    return found


def find_commit() -> str | None:
    """The commit of this project, and whether files differ from it; None where that cannot be told."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    settings = tyro.cli(Machine, args=arguments, prog="machine.py", config=(tyro.conf.FlagCreatePairsOff,))
    found = describe(settings.dry)
    write_results(settings.out, found)
    Console(highlight=False, soft_wrap=True).print("\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    with mistakes_told():
        sys.exit(main(sys.argv[1:]))
