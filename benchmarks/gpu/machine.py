#!/usr/bin/env python3
"""Checks that all that `make gpu` needs is installed and that there is a GPU, and says what was found."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu.install import NEEDED
from benchmarks.measure import environment, run_command, write_results
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
    found = {**environment(["torch", *NEEDED]), "cuda": torch.version.cuda, "dry": dry}
    if not dry and "gpu" not in found:
        raise UserError(f"torch {torch.__version__} finds no GPU: check nvidia-smi, or take make gpu DRY=1")
    return found


def run(settings: Machine, console: Console) -> None:
    """Says what is found, and keeps it."""
    found = describe(settings.dry)
    write_results(settings.out, found)
    console.print("\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    run_command(Machine, run)
